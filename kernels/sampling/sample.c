/* A token for each row of logits: ops that run one after the other.
 *
 *   sample_adjust   biases and penalties, of rows that have any
 *   sample_highest  the largest value of every part of a row, and whether all logits are finite
 *   sample_limits   what top-k and top-p keep (limits.c)
 *   sample_draw     the best score with its noise of every part
 *   sample_pick     the best of the parts
 *
 * Where all rows are greedy sample_highest and sample_pick do.
 */

#include "values.h"

/* Mirrored by kernels/sampling/native.py; see Adjustments. */
typedef struct {
    const void *logits;    /* [.., vocab] */
    float *adjusted;       /* [m, vocab] */
    const int64_t *rows;   /* [m] */
    const float *repetition, *presence, *frequency; /* [m] */
    const int64_t *history_row;                     /* [m], -1 for none */
    const int32_t *history;                         /* [.., vocab] */
    const int64_t *bias_row, *bias_token;           /* [num_biases], bias_row ascending */
    const float *bias;
    int64_t stride, vocab, dtype, num_rows, num_biases;
} Adjusting;

enum { IN_COMPLETION = 2 };

/* The first place of an ascending list whose number is not below `least`. */
static int64_t first_from(const int64_t *numbers, int64_t count, int64_t least) {
    int64_t begin = 0, end = count;
    while (begin < end) {
        const int64_t middle = (begin + end) / 2;
        if (numbers[middle] < least)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

/* The product in float64 is exact, so that it is rounded to float32 by itself, as torch does, and not as a part of a
 * fused sum. */
INLINE float penalised(float x, int32_t seen, float repetition, float presence, float frequency) {
    const int32_t times = seen / IN_COMPLETION;
    x = x > 0 ? x / repetition : x * repetition;
    x -= (float)((double)frequency * times);
    return times > 0 ? x - presence : x;
}

static int64_t num_adjusted(const void *problem, const Step *step, int64_t num_threads) {
    (void)step, (void)num_threads;
    return ((const Adjusting *)problem)->num_rows;
}

static void adjust(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)step, (void)num_threads, (void)scratch;
    const Adjusting *p = problem;
    const int64_t item = item_bytes((int)p->dtype);
    const char *logits = (const char *)p->logits + p->rows[task] * p->stride * item;
    float *values = p->adjusted + task * p->vocab;
    for (int64_t token = 0; token < p->vocab; token++) values[token] = load_one(logits, token, (int)p->dtype);
    const int64_t begin = first_from(p->bias_row, p->num_biases, task);
    for (int64_t idx = begin; idx < p->num_biases && p->bias_row[idx] == task; idx++)
        values[p->bias_token[idx]] += p->bias[idx];
    if (p->history_row[task] < 0) return;
    const int32_t *history = p->history + p->history_row[task] * p->vocab;
    for (int64_t token = 0; token < p->vocab; token++)
        if (history[token] > 0)
            values[token] = penalised(values[token], history[token], p->repetition[task], p->presence[task],
                                      p->frequency[task]);
}

typedef struct {
    float highest;
    int64_t token; /* the first that has it */
    int is_finite;
} Scan;

/* Of the numbers [begin, end) of a row. */
INLINE Scan scan(const void *row, int64_t begin, int64_t end, int dtype) {
    enum { BLOCK = 8 * PAIR };
    const int64_t whole = begin + (end - begin) / PAIR * PAIR;
    vec most[2] = {all(-__builtin_inff()), all(-__builtin_inff())}, spoiled[2] = {{0}, {0}};
    for (int64_t place = begin; place < whole; place += PAIR) {
        vec value[2];
        load_pair(row, place, dtype, &value[0], &value[1]);
        for (int half = 0; half < 2; half++) {
            most[half] = choose(value[half] > most[half], value[half], most[half]);
            spoiled[half] += value[half] * 0.0f; /* NaN, from then on, where a number is not finite */
        }
    }
    Scan found = {-__builtin_inff(), begin, 1};
    float lanes[LANES], zeros = sum_of(spoiled[0] + spoiled[1]);
    most[0] = choose(most[1] > most[0], most[1], most[0]);
    memcpy(lanes, &most[0], sizeof lanes);
    for (int lane = 0; lane < LANES; lane++)
        if (lanes[lane] > found.highest) found.highest = lanes[lane];
    for (int64_t place = whole; place < end; place++) {
        const float value = load_one(row, place, dtype);
        if (value > found.highest) found.highest = value;
        zeros += value * 0.0f;
    }
    found.is_finite = zeros == 0;
    /* The second look: blocks until the value is met. */
    int64_t place = begin;
    for (; place + BLOCK <= end; place += BLOCK) {
        mask equal = {0};
        for (int64_t pair = place; pair < place + BLOCK; pair += PAIR) {
            vec first, second;
            load_pair(row, pair, dtype, &first, &second);
            equal |= (first == found.highest) | (second == found.highest);
        }
        if (any_of((longs)equal)) break;
    }
    for (; place < end; place++)
        if (load_one(row, place, dtype) == found.highest) {
            found.token = place;
            break;
        }
    return found;
}

static Scan scan_of(const void *row, int64_t begin, int64_t end, int dtype) {
    if (dtype == BFLOAT16) return scan(row, begin, end, BFLOAT16);
    if (dtype == FLOAT16) return scan(row, begin, end, FLOAT16);
    return scan(row, begin, end, FLOAT32);
}

static int64_t num_parts_of_all(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    return step->num_tokens * num_parts(problem);
}

static void find_highest(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)step, (void)num_threads, (void)scratch;
    const Sampling *p = problem;
    const int64_t row = task / num_parts(p), part = task % num_parts(p);
    const int64_t begin = part * PART, end = end_of_part(p, part);
    Scan found = scan_of(logits_of(p, row), begin, end, (int)p->dtype);
    p->is_finite_part[task] = (uint8_t)found.is_finite;
    if (adjusted_of(p, row)) found = scan_of(adjusted_of(p, row), begin, end, FLOAT32);
    p->highest[task] = found.highest;
    p->highest_token[task] = found.token;
}

/* Noise is -log(-log(u)) of a u in [2^-53, 1 - 2^-53], between -3.61 and 36.74. The most likely token of a row has the
 * score 0: tokens with scores that are lower than it by more than 40.35 are never drawn, such as all that a constraint
 * forbids. */
static const double OUT_OF_REACH = 41;

/* A row that draws: what its tokens are judged by. */
typedef struct {
    words key;
    double highest, temperature, min_p;
    double lowest; /* of the values that can be drawn */
} Judge;

typedef struct {
    double score;
    int64_t token;
} Best;

/* The best of the tokens [token, token + WIDE), whose values lie at `values`, and of those before them.
 *
 * Noise costs two logarithms. It is at most -log(1 - u), since 1 - u <= -log(u), and that is at most the power of two
 * of 1 - u in units of -log(2), rounded up here: most tokens cannot be the best one and are not looked at further. */
INLINE Best judge(const Judge *by, const float *values, int64_t token, Best best) {
    const wide value = load_wide(values);
    const longs is_kept = value >= by->lowest;
    if (!any_of(is_kept)) return best;
    const wide score = scores_of(value, by->highest, by->temperature), uniform = uniform_of(by->key, token);
    const longs power = (longs)((words)(1.0 - uniform) >> 52) - 1023;
    if (!any_of(is_kept & (score - 0.6932 * from_longs(power) > best.score))) return best;
    const wide noisy = score - logarithm(-logarithm(uniform));
    longs is_judged = is_kept;
    if (by->min_p > 0) is_judged &= exponential_wide(score) >= by->min_p;
    for (int lane = 0; lane < WIDE; lane++)
        if (is_judged[lane] && noisy[lane] > best.score) best = (Best){noisy[lane], token + lane};
    return best;
}

static int64_t tile_bytes(const void *problem, const Step *step) {
    (void)problem, (void)step;
    return 4 * padded(TILE);
}

static void draw(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)step, (void)num_threads;
    const Sampling *p = problem;
    const int64_t row = task / num_parts(p), part = task % num_parts(p), end = end_of_part(p, part);
    if (!draws(p, row)) return;
    const double highest = highest_of_row(p, row), temperature = p->temperature[row], lowest = p->lowest[row];
    const double reached = highest - OUT_OF_REACH * temperature;
    const Judge by = {noise_key(p->seed[row], p->position[row]), highest, temperature, p->min_p[row],
                      lowest > reached ? lowest : reached};
    Best best = {-__builtin_inf(), part * PART};
    for (int64_t begin = part * PART; begin < end; begin += TILE) {
        const int64_t count = end - begin < TILE ? end - begin : TILE;
        load_tile(p, row, begin, begin + count, scratch);
        for (int64_t place = 0; place < count; place += WIDE)
            best = judge(&by, (const float *)scratch + place, begin + place, best);
    }
    p->best[task] = best.score;
    p->best_token[task] = best.token;
}

static int64_t one_task(const void *problem, const Step *step, int64_t num_threads) {
    (void)problem, (void)num_threads;
    return step->num_tokens > 0;
}

static void pick(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)task, (void)num_threads, (void)scratch;
    const Sampling *p = problem;
    const int64_t parts = num_parts(p);
    for (int64_t row = 0; row < step->num_tokens; row++) {
        const int is_drawn = draws(p, row);
        int64_t token = 0;
        double most = -__builtin_inf();
        int is_finite = 1;
        for (int64_t part = row * parts; part < (row + 1) * parts; part++) {
            const double score = is_drawn ? p->best[part] : (double)p->highest[part];
            if (score > most) {
                most = score;
                token = is_drawn ? p->best_token[part] : p->highest_token[part];
            }
            is_finite &= p->is_finite_part[part];
        }
        p->is_finite[row] = (uint8_t)is_finite;
        p->tokens[row] = is_finite ? token : 0;
    }
}

const OpKind sample_adjust_op = {"sample_adjust", num_adjusted, adjust, NULL};
const OpKind sample_highest_op = {"sample_highest", num_parts_of_all, find_highest, NULL};
const OpKind sample_draw_op = {"sample_draw", num_parts_of_all, draw, tile_bytes};
const OpKind sample_pick_op = {"sample_pick", one_task, pick, NULL};
