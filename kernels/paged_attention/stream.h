/* The keys of one query, block by block as they lie in the cache: what decodes with few query heads for each key head
 * run, since these are bound by memory. Each block is read once, in order, and the one that follows is fetched meanwhile.
 */

#ifndef MOTET_ATTENTION_STREAM_H
#define MOTET_ATTENTION_STREAM_H

#include "attention.h"

enum {
    TOKENS = LANES / 2, /* keys whose sums are found together; blocks are a multiple of four */
    CHUNK = 256         /* keys of one turn of the softmax, in whole blocks */
};

/* The sums of some keys for some heads. `mixed` is in the order of pairs of the cache. */
typedef struct {
    float *highest, *total, *mixed; /* [heads], [heads], [heads, value_width] */
} Sums;

/* Some key heads of one sequence. */
typedef struct {
    const Attention *p;
    const int32_t *table;
    int64_t token, first_key, end_key, first_head, num_heads; /* key heads */
    int64_t group;                                            /* query heads of a key head */
    int64_t key_width, value_width;                           /* rows of query and mixed: whole pairs */
    float *query, *scores, *scales; /* [num_heads * group, key_width], [.., CHUNK], [2, CHUNK] */
    float *tile; /* scratch of tile.h, which takes the place of these */
    Sums part, whole;
} Task;

/* Vectors of n sums in 2 * width lanes each, to vectors of 2n sums in `width` lanes each: a's and b's in turn. */
#if defined(__AVX512F__)
#define FOLD_8(a, b)                                                              \
    (SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +      \
     SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD_4(a, b)                                                              \
    (SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +    \
     SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#define FOLD_2(a, b)                                                              \
    (SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +    \
     SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define FOLD_1(a)                                                                 \
    (SHUFFLE(a, a, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14) +        \
     SHUFFLE(a, a, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15))
#else
#define FOLD_4(a, b) (SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#define FOLD_2(a, b) (SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#define FOLD_1(a) (SHUFFLE(a, a, 0, 2, 4, 6, 0, 2, 4, 6) + SHUFFLE(a, a, 1, 3, 5, 7, 1, 3, 5, 7))
#endif

/* The sums over the lanes of TOKENS vectors, in the first TOKENS lanes. */
INLINE vec sums_of(const vec *values) {
#if defined(__AVX512F__)
    const vec one = FOLD_4(FOLD_8(values[0], values[4]), FOLD_8(values[2], values[6]));
    const vec other = FOLD_4(FOLD_8(values[1], values[5]), FOLD_8(values[3], values[7]));
#else
    const vec one = FOLD_4(values[0], values[2]), other = FOLD_4(values[1], values[3]);
#endif
    const vec pairs = FOLD_2(one, other);
    return FOLD_1(pairs);
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

INLINE const char *block_of(const Task *task, const void *cache, int64_t dim, int64_t key, int dtype) {
    const Attention *p = task->p;
    const int64_t row = (int64_t)task->table[key / p->block_size] * p->block_size * p->num_kv_heads + task->first_head;
    return (const char *)cache + row * dim * item_bytes(dtype);
}

/* Where to fetch while the block at `key` is worked on: the block after it among those up to `end`, or `then`. */
INLINE Ahead ahead_of(const Task *task, const void *cache, int64_t dim, int64_t key, int64_t end, const char *then,
                      int64_t then_dim, int dtype) {
    const int64_t following = key + task->p->block_size, wide = following < end ? dim : then_dim;
    const char *row = following < end ? block_of(task, cache, dim, following, dtype) : then;
    const int64_t bytes = wide * item_bytes(dtype);
    return (Ahead){row, task->num_heads * bytes, task->p->num_kv_heads * bytes, 0};
}

/* scores[head][token] of `heads` query heads of one key head and `tokens` keys, `stride` bytes from key to key. */
INLINE void dot_tile(const Task *task, const float *query, const char *keys, float *scores, int64_t stride, int tokens,
                     int heads, int dtype, Ahead *ahead) {
    const int64_t width = task->key_width;
    vec sums[2][TOKENS];
    for (int head = 0; head < heads; head++)
        for (int token = 0; token < TOKENS; token++) sums[head][token] = (vec){0};
    EACH_PAIR(task->p->key_dim, {
        fetch(ahead, tokens * count * item_bytes(dtype));
        for (int token = 0; token < tokens; token++) {
#ifdef __AVX512BF16__
            if (dtype == BFLOAT16) {
                const __m512bh key = (__m512bh)load_codes(keys + token * stride + place * 2, count);
                for (int head = 0; head < heads; head++) {
                    const __m512bh part = (__m512bh)load(query + head * width + place / 2);
                    sums[head][token] = (vec)_mm512_dpbf16_ps((__m512)sums[head][token], part, key);
                }
                continue;
            }
#endif
            vec first, second;
            load_cached(keys + token * stride, place, count, dtype, &first, &second);
            for (int head = 0; head < heads; head++) {
                sums[head][token] += load(query + head * width + place) * first;
                sums[head][token] += load(query + head * width + place + LANES) * second;
            }
        }
    })
    for (int head = 0; head < heads; head++) {
        const vec several = sums_of(sums[head]);
        memcpy(scores + head * CHUNK, &several, sizeof(float) * (size_t)tokens);
    }
}

INLINE void dot_tokens(const Task *task, const float *query, const char *keys, float *scores, int64_t stride, int tokens,
                       int dtype, Ahead *ahead) {
    int64_t head = 0;
    for (; head + 2 <= task->group; head += 2, ahead = NULL)
        dot_tile(task, query + head * task->key_width, keys, scores + head * CHUNK, stride, tokens, 2, dtype, ahead);
    if (head < task->group)
        dot_tile(task, query + head * task->key_width, keys, scores + head * CHUNK, stride, tokens, 1, dtype, ahead);
}

/* Raw scores of a chunk's keys, whole blocks of them: those outside of the sequence are overwritten by `weigh`. */
INLINE void dot_chunk(const Task *task, int64_t start, int64_t end, int dtype) {
    const Attention *p = task->p;
    const int64_t row_bytes = p->key_dim * item_bytes(dtype), stride = p->num_kv_heads * row_bytes;
    const char *values = block_of(task, p->values, p->value_dim, start, dtype);
    for (int64_t key = start; key < end; key += p->block_size) {
        const char *block = block_of(task, p->keys, p->key_dim, key, dtype);
        Ahead ahead = ahead_of(task, p->keys, p->key_dim, key, end, values, p->value_dim, dtype);
        for (int64_t kv_head = 0; kv_head < task->num_heads; kv_head++) {
            const float *query = task->query + kv_head * task->group * task->key_width;
            float *scores = task->scores + kv_head * task->group * CHUNK + key - start;
            const char *keys = block + kv_head * row_bytes;
            int64_t place = 0;
            for (; place + TOKENS <= p->block_size; place += TOKENS)
                dot_tokens(task, query, keys + place * stride, scores + place, stride, TOKENS, dtype, &ahead);
            if (LANES == 16 && place < p->block_size)
                dot_tokens(task, query, keys + place * stride, scores + place, stride, TOKENS / 2, dtype, &ahead);
        }
    }
}

/* The scales of one key head's tokens [start, end) of the sequence, 1 for those outside of it. */
static void gather_scales(const Task *task, const float *scales, int64_t kv_head, int64_t start, int64_t end, float *to) {
    const Attention *p = task->p;
    const int64_t head = task->first_head + kv_head, padded = (end - start + LANES - 1) / LANES * LANES;
    for (int64_t idx = 0; idx < padded; idx++) to[idx] = 1;
    for (int64_t key = start; key < end; key += p->block_size) {
        const int64_t row = (int64_t)task->table[key / p->block_size] * p->block_size;
        const int64_t first = larger(task->first_key - key, 0), last = smaller(task->end_key - key, p->block_size);
        const float *from = scales + row * p->num_kv_heads + head;
        for (int64_t idx = first; idx < last; idx++) to[key - start + idx] = from[idx * p->num_kv_heads];
    }
}

/* Scores of one head's keys [start, end) to weights; returns what the part's sums so far are to be multiplied by. */
static float weigh(const Task *task, int64_t head, int64_t start, int64_t end) {
    const Attention *p = task->p;
    float *scores = task->scores + head * CHUNK;
    const int64_t query_head = task->first_head * task->group + head;
    const int64_t hidden = larger(task->first_key - start, 0), last = smaller(end, task->end_key) - start;
    const int64_t padded = (last + LANES - 1) / LANES * LANES;
    for (int64_t idx = 0; idx < hidden; idx++) scores[idx] = 0;
    for (int64_t idx = last; idx < padded; idx++) scores[idx] = 0;
    const float scale = p->scale * scale_of_codes(p);
    for (int64_t idx = 0; idx < padded; idx += LANES) {
        const vec factor = p->key_scales ? scale * load(task->scales + idx) : all(scale);
        store(scores + idx, load(scores + idx) * factor);
    }
    if (p->softcap != 0)
        for (int64_t idx = 0; idx < padded; idx += LANES)
            store(scores + idx, p->softcap * hyperbolic_tangent(load(scores + idx) / p->softcap));
    if (p->slopes)
        for (int64_t idx = hidden; idx < last; idx++)
            scores[idx] += p->slopes[query_head] * (float)(start + idx - (task->end_key - 1));
    for (int64_t idx = 0; idx < hidden; idx++) scores[idx] = -INFINITE;
    for (int64_t idx = last; idx < padded; idx++) scores[idx] = -INFINITE;
    vec lanes = all(task->part.highest[head]);
    for (int64_t idx = 0; idx < padded; idx += LANES) {
        const vec some = load(scores + idx);
        lanes = larger_lanes(some, lanes);
    }
    const float highest = highest_of(lanes);
    /* With scores of -inf alone all weights are 0, not NaN. */
    const float shift = highest == -INFINITE ? 0.0f : highest;
    vec total = {0};
    for (int64_t idx = 0; idx < padded; idx += LANES) {
        const vec weights = exponential(load(scores + idx) - shift);
        store(scores + idx, p->value_scales ? weights * load(task->scales + CHUNK + idx) : weights);
        total += weights;
    }
    const float decay = exponential_of(task->part.highest[head] - shift);
    task->part.total[head] = task->part.total[head] * decay + sum_of(total);
    task->part.highest[head] = highest;
    return decay;
}

static void weigh_chunk(const Task *task, int64_t start, int64_t end) {
    for (int64_t head = 0; head < task->num_heads * task->group; head++) {
        if (head % task->group == 0 && task->p->key_scales)
            gather_scales(task, task->p->key_scales, head / task->group, start, end, task->scales);
        if (head % task->group == 0 && task->p->value_scales)
            gather_scales(task, task->p->value_scales, head / task->group, start, end, task->scales + CHUNK);
        const float decay = weigh(task, head, start, end);
        float *mixed = task->part.mixed + head * task->value_width;
        for (int64_t place = 0; place < task->value_width; place += LANES)
            store(mixed + place, load(mixed + place) * decay);
    }
}

/* mixed[head] += sum over tokens of weights[head][token] values[token], for `pairs` pairs, or half of one. */
INLINE void mix_tile(const Task *task, const float *weights, const char *values, float *mixed, int64_t stride,
                     int64_t tokens, int heads, int pairs, int count, int dtype, Ahead *ahead) {
    vec sums[2][4];
    for (int head = 0; head < heads; head++)
        for (int half = 0; half < 2 * pairs; half++) sums[head][half] = (vec){0};
    for (int64_t token = 0; token < tokens; token++) {
        fetch(ahead, pairs * count * item_bytes(dtype));
        for (int pair = 0; pair < pairs; pair++) {
            vec first, second;
            load_cached(values + token * stride, pair * PAIR, count, dtype, &first, &second);
            for (int head = 0; head < heads; head++) {
                const float weight = weights[head * CHUNK + token];
                sums[head][2 * pair] += weight * first;
                sums[head][2 * pair + 1] += weight * second;
            }
        }
    }
    for (int head = 0; head < heads; head++)
        for (int half = 0; half < 2 * pairs; half++) {
            float *place = mixed + head * task->value_width + half * LANES;
            store(place, load(place) + sums[head][half]);
        }
}

/* One key head's part of mix_chunk for its query heads. */
INLINE void mix_heads(const Task *task, const float *weights, const char *values, float *mixed, int64_t stride,
                      int64_t tokens, int pairs, int count, int dtype, Ahead *ahead) {
    int64_t head = 0;
    for (; head + 2 <= task->group; head += 2, ahead = NULL)
        mix_tile(task, weights + head * CHUNK, values, mixed + head * task->value_width, stride, tokens, 2, pairs, count,
                 dtype, ahead);
    if (head < task->group)
        mix_tile(task, weights + head * CHUNK, values, mixed + head * task->value_width, stride, tokens, 1, pairs, count,
                 dtype, ahead);
}

INLINE void mix_chunk(const Task *task, int64_t start, int64_t end, int64_t end_of_part, int dtype) {
    const Attention *p = task->p;
    const int64_t dim = p->value_dim, item = item_bytes(dtype), stride = p->num_kv_heads * dim * item;
    const char *keys = block_of(task, p->keys, p->key_dim, end < end_of_part ? end : start, dtype);
    for (int64_t key = start; key < end; key += p->block_size) {
        Ahead ahead = ahead_of(task, p->values, dim, key, end, keys, p->key_dim, dtype);
        const int64_t hidden = larger(task->first_key - key, 0);
        const int64_t tokens = smaller(task->end_key - key, p->block_size) - hidden;
        const char *block = block_of(task, p->values, dim, key, dtype) + hidden * stride;
        for (int64_t kv_head = 0; kv_head < task->num_heads; kv_head++) {
            const float *weights = task->scores + kv_head * task->group * CHUNK + key - start + hidden;
            const char *values = block + kv_head * dim * item;
            float *mixed = task->part.mixed + kv_head * task->group * task->value_width;
            int64_t place = 0;
            for (; place + 2 * PAIR <= dim; place += 2 * PAIR)
                mix_heads(task, weights, values + place * item, mixed + place, stride, tokens, 2, PAIR, dtype, &ahead);
            for (; place + PAIR <= dim; place += PAIR)
                mix_heads(task, weights, values + place * item, mixed + place, stride, tokens, 1, PAIR, dtype, &ahead);
            if (LANES == 16 && place < dim)
                mix_heads(task, weights, values + place * item, mixed + place, stride, tokens, 1, PAIR / 2, dtype,
                          &ahead);
        }
    }
}

/* The query's heads in float32, in the order of the cache's pairs, or in the bfloat16 that they are. */
INLINE void load_query(const Task *task, int dtype) {
    const Attention *p = task->p;
    const char *row = (const char *)p->query + task->token * p->query_stride * item_bytes((int)p->dtype);
    for (int64_t head = 0; head < task->num_heads * task->group; head++) {
        const int64_t from = (task->first_head * task->group + head) * p->key_dim;
        float *to = task->query + head * task->key_width;
        EACH_PAIR(p->key_dim, {
            vec first, second;
            if (has_pairs(dtype)) {
                store(to + place / 2, (vec)load_codes(row + (from + place) * 2, count));
                continue;
            }
            if (dtype == BFLOAT16) {
                load_cached(row, from + place, count, dtype, &first, &second);
            } else {
                first = load_in_order(row, from + place, (int)p->dtype);
                second = count == PAIR ? load_in_order(row, from + place + LANES, (int)p->dtype) : (vec){0};
            }
            store(to + place, first);
            store(to + place + LANES, second);
        })
    }
}

/* Adds the keys [start, end) to task->part, whole blocks but for the sequence's end. */
INLINE void attend_part(const Task *task, int64_t start, int64_t end, int dtype) {
    const int64_t block_size = task->p->block_size, step = CHUNK / block_size * block_size;
    for (; start < end; start += step) {
        const int64_t end_of_chunk = smaller(start + step, end);
        dot_chunk(task, start, end_of_chunk, dtype);
        weigh_chunk(task, start, end_of_chunk);
        mix_chunk(task, start, end_of_chunk, end, dtype);
    }
}

#endif
