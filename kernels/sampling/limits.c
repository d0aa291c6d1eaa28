/* The least value that top-k and top-p keep of each row: the smallest t with measure(values > t) < limit, the measure
 * being the count for top-k and the integer mass for top-p.
 *
 * Values are searched as ordered integers, a digit of 11, 11 and 10 bits after the other: the measure is summed per
 * digit, and digits are gone through from the top until the limit is reached. Values that have the first digit are
 * kept apart, since they are few. Integers give the same sums in any order.
 */

#include "values.h"

enum { KEY_BITS = 32, DIGIT_BITS = 11, NUM_DIGITS = 1 << DIGIT_BITS };

/* Scratch space of one row. */
typedef struct {
    int64_t sums[NUM_DIGITS];
    int64_t masses[TILE];
    float tile[TILE + 2 * LANES];
    float left[]; /* [vocab], padded */
} Room;

/* What is searched for in a row. */
typedef struct {
    const Sampling *problem;
    int64_t row;
    double highest, temperature;
    uint32_t least;   /* values below it are not kept anyway, in the order of `ordered` */
    int is_of_mass;
    int64_t limit;
} Search;

/* Digits of t that have been found, and the measure of the values above all that begin with them. */
typedef struct {
    uint32_t prefix;
    int num_bits;
    int64_t above;
} Found;

/* exp(score) in units of 2^-40, rounded, of `count` values. */
static void find_masses(const Search *search, const float *values, int64_t count, int64_t *masses) {
    for (int64_t place = 0; place < count; place += WIDE) {
        const wide score = scores_of(load_wide(values + place), search->highest, search->temperature);
        const longs mass = __builtin_convertvector(exponential_wide(score) * 0x1p40 + 0.5, longs);
        memcpy(masses + place, &mass, sizeof mass);
    }
}

static int begins_with(uint32_t key, const Found *found) {
    return (uint64_t)key >> (KEY_BITS - found->num_bits) == found->prefix;
}

/* Adds the measures of values that begin with what was found, by their next digit, to the sums. */
static void add_digits(const Search *search, const float *values, int64_t count, const Found *found, int num_bits,
                       Room *room) {
    const int shift = KEY_BITS - found->num_bits - num_bits;
    if (search->is_of_mass) find_masses(search, values, count, room->masses);
    for (int64_t place = 0; place < count; place++) {
        const uint32_t key = ordered(values[place]);
        if (key < search->least || !begins_with(key, found)) continue;
        room->sums[key >> shift & ((1u << num_bits) - 1)] += search->is_of_mass ? room->masses[place] : 1;
    }
}

/* One digit more. With sums [.. 2 5 1] of the last digits, nothing above and a limit of 4: the last but one, since
 * 1 < 4 <= 1 + 5. */
static Found descend(const Search *search, const Room *room, Found found, int num_bits) {
    int64_t digit = (1 << num_bits) - 1, above = found.above;
    while (digit > 0 && above + room->sums[digit] < search->limit) above += room->sums[digit--];
    return (Found){found.prefix << num_bits | (uint32_t)digit, found.num_bits + num_bits, above};
}

/* Puts the values that begin with what was found into room->left; how many they are. */
static int64_t collect(const Search *search, const Found *found, Room *room) {
    const int64_t vocab = search->problem->vocab;
    int64_t num_left = 0;
    for (int64_t begin = 0; begin < vocab; begin += TILE) {
        const int64_t count = vocab - begin < TILE ? vocab - begin : TILE;
        load_tile(search->problem, search->row, begin, begin + count, room->tile);
        for (int64_t place = 0; place < count; place++) {
            room->left[num_left] = room->tile[place];
            num_left += begins_with(ordered(room->tile[place]), found);
        }
    }
    return num_left;
}

/* t as an ordered integer. top_p is of a search by mass: the limit is that part of all that is not below `least`. */
static uint32_t find(Search *search, double top_p, Room *room) {
    const int64_t vocab = search->problem->vocab;
    Found found = {0, 0, 0};
    memset(room->sums, 0, sizeof room->sums);
    for (int64_t begin = 0; begin < vocab; begin += TILE) {
        const int64_t count = vocab - begin < TILE ? vocab - begin : TILE;
        load_tile(search->problem, search->row, begin, begin + count, room->tile);
        add_digits(search, room->tile, count, &found, DIGIT_BITS, room);
    }
    if (search->is_of_mass) {
        int64_t total = 0;
        for (int digit = 0; digit < NUM_DIGITS; digit++) total += room->sums[digit];
        search->limit = (int64_t)(top_p * (double)total);
        if (search->limit < 1) search->limit = 1;
    }
    found = descend(search, room, found, DIGIT_BITS);
    const int64_t num_left = collect(search, &found, room);
    while (found.num_bits < KEY_BITS) {
        const int rest = KEY_BITS - found.num_bits, num_bits = rest < DIGIT_BITS ? rest : DIGIT_BITS;
        memset(room->sums, 0, sizeof room->sums);
        for (int64_t begin = 0; begin < num_left; begin += TILE) {
            const int64_t count = num_left - begin < TILE ? num_left - begin : TILE;
            add_digits(search, room->left + begin, count, &found, num_bits, room);
        }
        found = descend(search, room, found, num_bits);
    }
    return found.prefix;
}

/* The float of an ordered integer; below that of -infinity there are none but NaN, and -infinity keeps all. */
static float value_of(uint32_t key) {
    if (key <= 0x007fffffu) return -__builtin_inff();
    const uint32_t code = key >> 31 ? key ^ 0x80000000u : ~key;
    float value;
    memcpy(&value, &code, sizeof value);
    return value;
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
    Search search = {p, row, highest_of_row(p, row), p->temperature[row], 0, 0, 0};
    if (p->top_k[row] > 0 && p->top_k[row] < p->vocab) {
        search.limit = p->top_k[row];
        search.least = find(&search, 1.0, scratch);
    }
    if (p->top_p[row] < 1.0f) {
        search.is_of_mass = 1;
        const uint32_t key = find(&search, p->top_p[row], scratch);
        if (key > search.least) search.least = key;
    }
    p->lowest[row] = value_of(search.least);
}

const OpKind sample_limits_op = {"sample_limits", num_rows, limit_row, scratch_bytes};
