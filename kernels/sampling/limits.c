/* The least value that top-k and top-p keep of each row: t, the smallest with measure(values > t) < limit, the measure
 * being the count for top-k and the integer mass for top-p.
 *
 * Few values of a row can be t. They are collected first, and among them t is found as an ordered integer, 8 bits after
 * the other: the measure is summed per digit, and digits are gone through from the top until the limit is reached.
 * Integers give the same sums in any order.
 */

#include "values.h"

enum { KEY_BITS = 32, DIGIT_BITS = 8, NUM_DIGITS = 1 << DIGIT_BITS, BLOCK = 64 };

/* Values whose score is below this are collected for top-p only where the others do not reach it. */
#define LIKELY_SCORE (-10.0)

/* Scratch space of one row. */
typedef struct {
    int64_t sums[NUM_DIGITS];
    int64_t masses[TILE];
    float tile[TILE + 2 * LANES];
    float collected[]; /* [vocab], padded */
} Room;

/* What is searched for in a row. */
typedef struct {
    const Sampling *problem;
    int64_t row;
    double highest, temperature;
    float least; /* values below it are not kept anyway */
    int is_of_mass;
    int64_t limit;
} Search;

typedef struct {
    int64_t count;       /* values collected */
    int64_t mass, total; /* of those, and of all that are not below `least`; for a search by mass */
} Collected;

/* exp(score) in units of 2^-40, rounded. */
INLINE longs mass_of(const Search *search, wide value) {
    const wide score = scores_of(value, search->highest, search->temperature);
    return __builtin_convertvector(exponential_wide(score) * 0x1p40 + 0.5, longs);
}

static int64_t total_of(longs masses) {
    int64_t total = 0;
    for (int lane = 0; lane < WIDE; lane++) total += masses[lane];
    return total;
}

/* Loads the tile of the row that begins at `begin`; how many values it has, a whole number of vectors with NaN. */
static int64_t next_tile(const Search *search, int64_t begin, Room *room) {
    const int64_t left = search->problem->vocab - begin, count = left < TILE ? left : TILE;
    load_tile(search->problem, search->row, begin, begin + count, room->tile);
    return (count + LANES - 1) / LANES * LANES;
}

/* Puts the values of the row that are not below `cut` into room->collected. */
static Collected collect(const Search *search, float cut, Room *room) {
    int64_t num_collected = 0;
    longs mass = {0}, total = {0};
    for (int64_t begin = 0; begin < search->problem->vocab; begin += TILE) {
        const int64_t count = next_tile(search, begin, room);
        for (int64_t place = 0; place < count; place += LANES) {
            if (!any_of((longs)(load(room->tile + place) >= cut))) continue;
            for (int64_t lane = place; lane < place + LANES; lane++) {
                room->collected[num_collected] = room->tile[lane];
                num_collected += room->tile[lane] >= cut;
            }
        }
        if (!search->is_of_mass) continue;
        for (int64_t place = 0; place < count; place += WIDE) {
            const wide value = load_wide(room->tile + place);
            const longs is_kept = value >= (double)search->least;
            if (!any_of(is_kept)) continue;
            const longs masses = mass_of(search, value) & is_kept;
            total += masses;
            mass += masses & (value >= (double)cut);
        }
    }
    return (Collected){num_collected, total_of(mass), total_of(total)};
}

/* Adds the measures of collected values that begin with `prefix`, by the digit behind it, to the sums. */
static void sum_digits(const Search *search, int64_t count, uint32_t prefix, int shift, Room *room) {
    memset(room->sums, 0, sizeof room->sums);
    for (int64_t begin = 0; begin < count; begin += TILE) {
        const float *values = room->collected + begin;
        const int64_t size = count - begin < TILE ? count - begin : TILE;
        for (int64_t place = 0; search->is_of_mass && place < size; place += WIDE) {
            const longs masses = mass_of(search, load_wide(values + place));
            memcpy(room->masses + place, &masses, sizeof masses);
        }
        for (int64_t place = 0; place < size; place++) {
            const uint32_t key = ordered(values[place]);
            if ((uint64_t)key >> (shift + DIGIT_BITS) != prefix) continue;
            room->sums[key >> shift & (NUM_DIGITS - 1)] += search->is_of_mass ? room->masses[place] : 1;
        }
    }
}

/* t of the collected values, a digit more in each turn. With sums [.. 2 5 1] of the last digits, nothing above and a limit
 * of 4 it is the last digit but one, since 1 < 4 <= 1 + 5. */
static float find(const Search *search, int64_t count, Room *room) {
    uint32_t prefix = 0;
    int64_t above = 0; /* measure of what is above all values that begin with the prefix */
    for (int shift = KEY_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        sum_digits(search, count, prefix, shift, room);
        uint32_t digit = NUM_DIGITS - 1;
        while (digit > 0 && above + room->sums[digit] < search->limit) above += room->sums[digit--];
        prefix = prefix << DIGIT_BITS | digit;
    }
    return value_of(prefix);
}

/* A value that is not above the k-th largest: the k-th largest of the largest of every block. */
static float cut_of_count(const Search *search, Room *room) {
    int64_t num_blocks = 0;
    for (int64_t begin = 0; begin < search->problem->vocab; begin += TILE) {
        const int64_t count = next_tile(search, begin, room);
        for (int64_t block = 0; block < count; block += BLOCK) {
            vec most = all(-__builtin_inff());
            for (int64_t place = block; place < block + BLOCK && place < count; place += LANES) {
                const vec value = load(room->tile + place);
                most = choose(value > most, value, most);
            }
            room->collected[num_blocks++] = highest_of(most);
        }
    }
    return num_blocks < search->limit ? -__builtin_inff() : find(search, num_blocks, room);
}

static float least_of_count(Search *search, int64_t top_k, Room *room) {
    search->limit = top_k;
    return find(search, collect(search, cut_of_count(search, room), room).count, room);
}

static float least_of_mass(Search *search, double top_p, Room *room) {
    search->is_of_mass = 1;
    const float likely = (float)(search->highest + LIKELY_SCORE * search->temperature);
    Collected found = collect(search, likely > search->least ? likely : search->least, room);
    search->limit = (int64_t)(top_p * (double)found.total);
    if (search->limit < 1) search->limit = 1;
    if (found.mass < search->limit) found = collect(search, search->least, room);
    return find(search, found.count, room);
}

static int64_t num_rows(const void *problem, const Step *step, int64_t num_threads) {
    (void)problem, (void)num_threads;
    return step->num_tokens;
}

static int64_t scratch_bytes(const void *problem, const Step *step) {
    (void)step;
    return (int64_t)sizeof(Room) + 4 * padded(((const Sampling *)problem)->vocab);
}

static void limit_row(const void *problem, const Step *step, int64_t row, int64_t num_threads, void *scratch) {
    (void)step, (void)num_threads;
    const Sampling *p = problem;
    if (!draws(p, row)) return;
    Search search = {p, row, highest_of_row(p, row), p->temperature[row], -__builtin_inff(), 0, 0};
    if (p->top_k[row] > 0 && p->top_k[row] < p->vocab) search.least = least_of_count(&search, p->top_k[row], scratch);
    if (p->top_p[row] < 1.0f) {
        const float least = least_of_mass(&search, p->top_p[row], scratch);
        if (least > search.least) search.least = least;
    }
    p->lowest[row] = search.least;
}

const OpKind sample_limits_op = {"sample_limits", num_rows, limit_row, scratch_bytes};
