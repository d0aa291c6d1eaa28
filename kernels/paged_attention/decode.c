/* Attention of one query per sequence over a paged cache of bfloat16 or float32, for CPUs.
 *
 * out[h] = sum over t of softmax_t(scale q[h] . k[t]) v[t], the softmax taken in chunks of keys as flash attention does
 * (Dao et al. 2022), everything in float32. What the options mean, kernels/paged_attention says; cpu_decode.py checks
 * all sizes and calls `attend`.
 *
 * Bound by memory: each block is read once, in order, and the block that follows is fetched meanwhile. A thread takes
 * one sequence, or some of its key heads, at a time. Which thread that is, and what else is in the batch, changes no
 * bit.
 */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef float vec __attribute__((vector_size(32)));
typedef uint32_t bits __attribute__((vector_size(32)));
typedef float quad __attribute__((vector_size(16)));
typedef uint32_t quad_bits __attribute__((vector_size(16)));
enum { LANES = 8, PAIR = 16, LINE = 64, TOKENS = 4, CHUNK = 256 };
#define INLINE static inline __attribute__((always_inline))

/* Mirrored field by field by cpu_decode.Problem. */
typedef struct {
    const void *query;           /* [num_tokens, num_heads, key_dim] */
    const void *keys;            /* [num_blocks, block_size, num_kv_heads, key_dim] */
    const void *values;          /* [num_blocks, block_size, num_kv_heads, value_dim] */
    void *output;                /* [num_tokens, num_heads, value_dim] */
    const int32_t *tables;       /* [num_sequences, table_width] */
    const int32_t *sequences;    /* [num_decodes]: rows of the tables */
    const int32_t *tokens;       /* [num_decodes]: rows of query and output */
    const int32_t *context_lens; /* [num_decodes], at least 1 */
    const float *sinks;          /* [num_heads] or NULL */
    const float *slopes;         /* [num_heads] or NULL */
    float *scratch;              /* scratch_size floats for each thread, on 64 bytes */
    int64_t scratch_size;
    int64_t num_decodes, head_parts; /* num_kv_heads is a multiple of head_parts */
    int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size, table_width;
    int64_t window; /* keys; 0: all */
    float scale, softcap; /* softcap 0: none */
    int32_t is_bfloat16;
} Problem;

typedef struct {
    const Problem *problem;
    atomic_llong next_task;
    atomic_int num_threads;
} Work;

/* A pair is 16 numbers of a row, in two vectors: of float32 the first eight and the rest, of bfloat16 the even ones and
 * the odd ones, which is how they come apart without a shuffle. Queries and outputs are put in the same order. */
INLINE void load_pair(const void *row, int64_t place, int is_bfloat16, vec *first, vec *second) {
    if (is_bfloat16) {
        bits both;
        memcpy(&both, (const uint16_t *)row + place, sizeof both);
        *first = (vec)(both << 16);
        *second = (vec)(both & 0xffff0000u);
    } else {
        memcpy(first, (const float *)row + place, sizeof *first);
        memcpy(second, (const float *)row + place + LANES, sizeof *second);
    }
}

INLINE vec load(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, vec value) { memcpy(to, &value, sizeof value); }

#ifdef __clang__
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (quad_bits){i, j, k, l})
#endif

/* The sums over the lanes of four vectors. */
INLINE quad sums_of(const vec *values) {
    quad half[4], pair[2];
    for (int idx = 0; idx < 4; idx++) {
        quad parts[2];
        memcpy(parts, values + idx, sizeof parts);
        half[idx] = parts[0] + parts[1];
    }
    for (int idx = 0; idx < 2; idx++) {
        const quad a = half[2 * idx], b = half[2 * idx + 1];
        pair[idx] = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
    }
    return SHUFFLE(pair[0], pair[1], 0, 1, 4, 5) + SHUFFLE(pair[0], pair[1], 2, 3, 6, 7);
}

INLINE float sum_of(vec value) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += value[lane];
    return sum;
}

/* To the nearest, ties to even; NaN stays one. */
INLINE uint16_t to_bfloat16(float value) {
    uint32_t code;
    memcpy(&code, &value, sizeof code);
    if ((code & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((code + 0x7fffu + ((code >> 16) & 1u)) >> 16);
}

/* e to the x for x <= 0, within 2 units in the last place; 0 below -87. Polynomial of Cephes' expf. */
INLINE float exponential(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, found in the low bits */
    float shifted = x * 1.44269504f + magic;
    float whole = shifted - magic;
    float rest = x - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    float series = 1.9875691500e-4f;
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    uint32_t code;
    memcpy(&code, &shifted, sizeof code);
    code = (code << 23) + 0x3f800000u;
    float power;
    memcpy(&power, &code, sizeof power);
    return x < -87.0f ? 0.0f : series * power;
}

/* The memory that is read next, fetched row by row while the present is worked on. */
typedef struct {
    const char *row;
    int64_t row_bytes, stride, place;
} Ahead;

INLINE void fetch(Ahead *ahead, int64_t num_bytes) {
    if (!ahead) return;
    for (int64_t done = 0; done < num_bytes; done += LINE) {
        __builtin_prefetch(ahead->row + ahead->place);
        ahead->place += LINE;
        if (ahead->place >= ahead->row_bytes) {
            ahead->place = 0;
            ahead->row += ahead->stride;
        }
    }
}

/* One thread's view of one task: a sequence and some of its key heads. */
typedef struct {
    const Problem *p;
    const int32_t *table;
    int64_t token, first_key, end_key, first_head, num_heads; /* key heads */
    int64_t group;                                            /* query heads of a key head */
    float *query, *scores, *mixed;  /* [num_heads * group, key_dim], [.., CHUNK], [.., value_dim], in order of pairs */
    float *highest, *total;         /* [num_heads * group] */
} Task;

INLINE const char *block_of(const Task *task, const void *cache, int64_t dim, int64_t key, int item) {
    const Problem *p = task->p;
    int64_t row = (int64_t)task->table[key / p->block_size] * p->block_size * p->num_kv_heads + task->first_head;
    return (const char *)cache + row * dim * item;
}

/* Where to fetch while the block at `key` is worked on: the block after it among those up to `end`, or `then`. */
INLINE Ahead ahead_of(const Task *task, const void *cache, int64_t dim, int64_t key, int64_t end, const char *then,
                      int64_t then_dim, int item) {
    int64_t following = key + task->p->block_size;
    int64_t wide = following < end ? dim : then_dim;
    const char *row = following < end ? block_of(task, cache, dim, following, item) : then;
    return (Ahead){row, task->num_heads * wide * item, task->p->num_kv_heads * wide * item, 0};
}

/* scores[head][token] of `heads` query heads of one key head and TOKENS keys, `stride` bytes from key to key. */
INLINE void dot_tile(const float *query, const char *keys, float *scores, int64_t dim, int64_t stride, int heads,
                     int is_bfloat16, Ahead *ahead) {
    vec sums[2][TOKENS];
    for (int head = 0; head < heads; head++)
        for (int token = 0; token < TOKENS; token++) sums[head][token] = (vec){0};
    for (int64_t place = 0; place < dim; place += PAIR) {
        fetch(ahead, TOKENS * PAIR * (is_bfloat16 ? 2 : 4));
        for (int token = 0; token < TOKENS; token++) {
            vec first, second;
            load_pair(keys + token * stride, place, is_bfloat16, &first, &second);
            for (int head = 0; head < heads; head++) {
                sums[head][token] += load(query + head * dim + place) * first;
                sums[head][token] += load(query + head * dim + place + LANES) * second;
            }
        }
    }
    for (int head = 0; head < heads; head++) {
        const quad four = sums_of(sums[head]);
        memcpy(scores + head * CHUNK, &four, sizeof four);
    }
}

/* mixed[head] += sum over tokens of weights[head][token] values[token], for `pairs` pairs. */
INLINE void mix_tile(const float *weights, const char *values, float *mixed, int64_t dim, int64_t stride,
                     int64_t tokens, int heads, int pairs, int is_bfloat16, Ahead *ahead) {
    vec sums[2][4];
    for (int head = 0; head < heads; head++)
        for (int half = 0; half < 2 * pairs; half++) sums[head][half] = (vec){0};
    for (int64_t token = 0; token < tokens; token++) {
        fetch(ahead, pairs * PAIR * (is_bfloat16 ? 2 : 4));
        for (int pair = 0; pair < pairs; pair++) {
            vec first, second;
            load_pair(values + token * stride, pair * PAIR, is_bfloat16, &first, &second);
            for (int head = 0; head < heads; head++) {
                const float weight = weights[head * CHUNK + token];
                sums[head][2 * pair] += weight * first;
                sums[head][2 * pair + 1] += weight * second;
            }
        }
    }
    for (int head = 0; head < heads; head++)
        for (int half = 0; half < 2 * pairs; half++) {
            float *place = mixed + head * dim + half * LANES;
            store(place, load(place) + sums[head][half]);
        }
}

/* Raw scores of a chunk's keys, whole blocks of them: those outside of the sequence are overwritten by `weigh`. */
INLINE void dot_chunk(const Task *task, int64_t start, int64_t end, int is_bfloat16) {
    const Problem *p = task->p;
    const int item = is_bfloat16 ? 2 : 4;
    const int64_t dim = p->key_dim, stride = p->num_kv_heads * dim * item;
    const char *values = block_of(task, p->values, p->value_dim, start, item);
    for (int64_t key = start; key < end; key += p->block_size) {
        const char *block = block_of(task, p->keys, dim, key, item);
        Ahead ahead = ahead_of(task, p->keys, dim, key, end, values, p->value_dim, item);
        for (int64_t place = 0; place < p->block_size; place += TOKENS)
            for (int64_t kv_head = 0; kv_head < task->num_heads; kv_head++) {
                const char *keys = block + place * stride + kv_head * dim * item;
                float *scores = task->scores + key - start + place;
                int64_t head = kv_head * task->group;
                const int64_t end_head = head + task->group;
                Ahead *next = &ahead;
                for (; head + 2 <= end_head; head += 2, next = NULL)
                    dot_tile(task->query + head * dim, keys, scores + head * CHUNK, dim, stride, 2, is_bfloat16, next);
                if (head < end_head)
                    dot_tile(task->query + head * dim, keys, scores + head * CHUNK, dim, stride, 1, is_bfloat16, next);
            }
    }
}

/* tanh of float32 within 4 units in the last place; by a series near 0, where 1 - e^-2x would lose digits. */
INLINE float hyperbolic_tangent(float x) {
    float size = x < 0 ? -x : x;
    if (size < 0.1f) {
        float square = x * x;
        return x * (1.0f + square * (-0.333333333f + square * (0.133333333f - square * 0.0539682540f)));
    }
    float decay = exponential(-2.0f * size);
    float value = (1.0f - decay) / (1.0f + decay);
    return x < 0 ? -value : value;
}

/* Scores of one head's keys [start, end) to weights; returns what the sums so far are to be multiplied by. */
static float weigh(const Task *task, int64_t head, int64_t start, int64_t end) {
    const Problem *p = task->p;
    float *scores = task->scores + head * CHUNK;
    const int64_t query_head = task->first_head * task->group + head;
    const int64_t hidden = task->first_key > start ? task->first_key - start : 0;
    const int64_t last = (end < task->end_key ? end : task->end_key) - start;
    if (p->softcap != 0)
        for (int64_t idx = hidden; idx < last; idx++)
            scores[idx] = p->softcap * hyperbolic_tangent(scores[idx] / p->softcap);
    if (p->slopes)
        for (int64_t idx = hidden; idx < last; idx++)
            scores[idx] += p->slopes[query_head] * (float)(start + idx - (task->end_key - 1));
    for (int64_t idx = 0; idx < hidden; idx++) scores[idx] = -__builtin_inff();
    const int64_t padded = (last + LANES - 1) / LANES * LANES;
    for (int64_t idx = last; idx < padded; idx++) scores[idx] = -__builtin_inff();
    float lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = task->highest[head];
    for (int64_t idx = 0; idx < padded; idx += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = scores[idx + lane] > lanes[lane] ? scores[idx + lane] : lanes[lane];
    float highest = lanes[0];
    for (int lane = 1; lane < LANES; lane++) highest = lanes[lane] > highest ? lanes[lane] : highest;
    /* With scores of -inf alone all weights are 0, not NaN. */
    const float shift = highest == -__builtin_inff() ? 0.0f : highest;
    vec total = {0};
    for (int64_t idx = 0; idx < padded; idx += LANES) {
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = exponential(scores[idx + lane] - shift);
        vec weights = load(lanes);
        store(scores + idx, weights);
        total += weights;
    }
    const float decay = exponential(task->highest[head] - shift);
    task->total[head] = task->total[head] * decay + sum_of(total);
    task->highest[head] = highest;
    return decay;
}

/* One key head's part of mix_chunk: mixed[head] += weights[head] @ values for its query heads, `pairs` pairs wide. */
INLINE void mix_heads(const Task *task, const float *weights, const char *values, float *mixed, int64_t stride,
                      int64_t tokens, int pairs, int is_bfloat16, Ahead *ahead) {
    const int64_t dim = task->p->value_dim;
    int64_t head = 0;
    for (; head + 2 <= task->group; head += 2, ahead = NULL)
        mix_tile(weights + head * CHUNK, values, mixed + head * dim, dim, stride, tokens, 2, pairs, is_bfloat16, ahead);
    if (head < task->group)
        mix_tile(weights + head * CHUNK, values, mixed + head * dim, dim, stride, tokens, 1, pairs, is_bfloat16, ahead);
}

INLINE void mix_chunk(const Task *task, int64_t start, int64_t end, int is_bfloat16) {
    const Problem *p = task->p;
    const int item = is_bfloat16 ? 2 : 4;
    const int64_t dim = p->value_dim, stride = p->num_kv_heads * dim * item;
    const char *keys = block_of(task, p->keys, p->key_dim, end < task->end_key ? end : start, item);
    for (int64_t key = start; key < end; key += p->block_size) {
        Ahead ahead = ahead_of(task, p->values, dim, key, end, keys, p->key_dim, item);
        const int64_t hidden = task->first_key > key ? task->first_key - key : 0;
        const int64_t left = task->end_key - key;
        const int64_t tokens = (left < p->block_size ? left : p->block_size) - hidden;
        const char *block = block_of(task, p->values, dim, key, item) + hidden * stride;
        for (int64_t kv_head = 0; kv_head < task->num_heads; kv_head++) {
            const float *weights = task->scores + kv_head * task->group * CHUNK + key - start + hidden;
            const char *values = block + kv_head * dim * item;
            float *mixed = task->mixed + kv_head * task->group * dim;
            int64_t place = 0;
            for (; place + 2 * PAIR <= dim; place += 2 * PAIR)
                mix_heads(task, weights, values + place * item, mixed + place, stride, tokens, 2, is_bfloat16, &ahead);
            if (place < dim)
                mix_heads(task, weights, values + place * item, mixed + place, stride, tokens, 1, is_bfloat16, &ahead);
        }
    }
}

/* Where number `idx` of a row stands in order of pairs. */
INLINE int64_t place_of(int64_t idx, int is_bfloat16) {
    if (!is_bfloat16) return idx;
    return idx / PAIR * PAIR + idx % 2 * LANES + idx % PAIR / 2;
}

INLINE void run_task(const Task *task, int is_bfloat16) {
    const Problem *p = task->p;
    const int64_t heads = task->num_heads * task->group;
    const int64_t row = task->token * p->num_heads + task->first_head * task->group;
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t idx = 0; idx < p->key_dim; idx++) {
            float value;
            if (is_bfloat16) {
                uint32_t code = (uint32_t)((const uint16_t *)p->query)[(row + head) * p->key_dim + idx] << 16;
                memcpy(&value, &code, sizeof value);
            } else
                value = ((const float *)p->query)[(row + head) * p->key_dim + idx];
            task->query[head * p->key_dim + place_of(idx, is_bfloat16)] = value * p->scale;
        }
        const float sink = p->sinks ? p->sinks[task->first_head * task->group + head] : 0.0f;
        task->highest[head] = p->sinks ? sink : -__builtin_inff();
        task->total[head] = p->sinks ? 1.0f : 0.0f;
    }
    memset(task->mixed, 0, sizeof(float) * (size_t)(heads * p->value_dim));
    const int64_t step = CHUNK / p->block_size * p->block_size;
    for (int64_t start = task->first_key / p->block_size * p->block_size; start < task->end_key; start += step) {
        const int64_t end = start + step < task->end_key ? start + step : task->end_key;
        dot_chunk(task, start, end, is_bfloat16);
        for (int64_t head = 0; head < heads; head++) {
            const float decay = weigh(task, head, start, end);
            float *mixed = task->mixed + head * p->value_dim;
            for (int64_t idx = 0; idx < p->value_dim; idx++) mixed[idx] *= decay;
        }
        mix_chunk(task, start, end, is_bfloat16);
    }
    for (int64_t head = 0; head < heads; head++)
        for (int64_t idx = 0; idx < p->value_dim; idx++) {
            const float value = task->mixed[head * p->value_dim + place_of(idx, is_bfloat16)] / task->total[head];
            const int64_t place = (row + head) * p->value_dim + idx;
            if (is_bfloat16)
                ((uint16_t *)p->output)[place] = to_bfloat16(value);
            else
                ((float *)p->output)[place] = value;
        }
}

static void run_thread(void *argument) {
    Work *work = argument;
    const Problem *p = work->problem;
    float *scratch = p->scratch + atomic_fetch_add(&work->num_threads, 1) * p->scratch_size;
    const int64_t kv_heads = p->num_kv_heads / p->head_parts, group = p->num_heads / p->num_kv_heads;
    const int64_t heads = kv_heads * group;
    for (;;) {
        const int64_t index = atomic_fetch_add(&work->next_task, 1);
        if (index >= p->num_decodes * p->head_parts) return;
        const int64_t decode = index / p->head_parts;
        const int64_t end_key = p->context_lens[decode];
        Task task = {
            .p = p,
            .table = p->tables + p->sequences[decode] * p->table_width,
            .token = p->tokens[decode],
            .first_key = p->window && end_key > p->window ? end_key - p->window : 0,
            .end_key = end_key,
            .first_head = index % p->head_parts * kv_heads,
            .num_heads = kv_heads,
            .group = group,
            .query = scratch,
            .scores = scratch + heads * p->key_dim,
            .mixed = scratch + heads * (p->key_dim + CHUNK),
            .highest = scratch + heads * (p->key_dim + CHUNK + p->value_dim),
            .total = scratch + heads * (p->key_dim + CHUNK + p->value_dim + 1),
        };
        if (p->is_bfloat16)
            run_task(&task, 1);
        else
            run_task(&task, 0);
    }
}

/* `parallel` is OpenMP's GOMP_parallel, or NULL to run everything here. */
void attend(const Problem *problem, unsigned num_threads, void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    Work work = {.problem = problem};
    if (parallel && num_threads > 1)
        parallel(run_thread, &work, num_threads, 0);
    else
        run_thread(&work);
}
