/* Heads of query and key normed if wanted, rotated in place, and keys and values written to the paged caches.
 *
 * A task is a run of tokens. A head is widened to float32, normed, turned, and rounded once.
 */

#include "../store_kv/store.h"
#include "rotation.h"

enum { NUMBERS_OF_TASK = 8192 };

/* Mirrored by kernels/rope/native.py. */
typedef struct {
    Store store;             /* the key's tokens are those that are rotated */
    void *query;             /* [num_tokens, num_heads, dim], dim being the key's */
    const void *query_norm;  /* [dim], weights in the dtype, or NULL for no norm of either */
    const void *key_norm;    /* [dim] */
    int64_t query_stride, query_head_stride, num_heads;
    int64_t half;           /* numbers n and n + half of a head are turned; what is behind 2 half is not */
    int64_t rotation_index; /* in Step.rotation */
    float eps, weight_offset;
} RotateStore;

/* What a task's heads share: parts of its scratch space, padded. */
typedef struct {
    float *cos, *sin;               /* of the token */
    float *query_weight, *key_weight; /* with their offset */
    float *head, *turned;
    float *store; /* of store_token */
} Room;

INLINE Room room_in(const RotateStore *p, float *scratch) {
    const int64_t half = padded(p->half), dim = padded(p->store.key.dim);
    float *const weights = scratch + 2 * half;
    return (Room){scratch,           scratch + half,    weights,          weights + dim,
                  weights + 2 * dim, weights + 3 * dim, weights + 4 * dim};
}

static int64_t scratch_bytes(const void *problem, const Step *step) {
    (void)step;
    const RotateStore *p = problem;
    return 4 * (2 * padded(p->half) + 4 * padded(p->store.key.dim) + store_scratch(&p->store));
}

INLINE void norm_head(const RotateStore *p, float *head, const float *weight) {
    const int64_t dim = p->store.key.dim;
    vec sum = {0};
    for (int64_t place = 0; place < dim; place += LANES) sum += load(head + place) * load(head + place);
    const vec scale = all(1.0f / __builtin_sqrtf(sum_of(sum) / (float)dim + p->eps));
    for (int64_t place = 0; place < dim; place += LANES)
        store(head + place, load(head + place) * scale * load(weight + place));
}

/* Each loop may pass its end by less than a vector, into what the next one writes, and the last into the padding. */
INLINE void turn_head(const Room *room, int64_t half, int64_t count) {
    const float *a = room->head, *b = room->head + half;
    for (int64_t place = 0; place < half; place += LANES)
        store(room->turned + place,
              load(a + place) * load(room->cos + place) - load(b + place) * load(room->sin + place));
    for (int64_t place = 0; place < half; place += LANES)
        store(room->turned + half + place,
              load(b + place) * load(room->cos + place) + load(a + place) * load(room->sin + place));
    for (int64_t place = 2 * half; place < count; place += LANES) store(room->turned + place, load(room->head + place));
}

INLINE void rotate_heads(const RotateStore *p, const Room *room, void *heads, int64_t count, int64_t head_stride,
                         const float *weight, int dtype) {
    const int64_t changed = weight ? p->store.key.dim : 2 * p->half; /* numbers of a head */
    for (int64_t idx = 0; idx < count; idx++) {
        void *head = (char *)heads + idx * head_stride * item_bytes(dtype);
        widen(head, changed, dtype, room->head);
        if (weight) norm_head(p, room->head, weight);
        turn_head(room, p->half, changed);
        narrow(room->turned, changed, dtype, head);
    }
}

INLINE void widen_table(const void *table, int64_t row, int64_t stride, int64_t half, int dtype, float *to) {
    const char *from = (const char *)table + row * stride * item_bytes(dtype);
    if (dtype == BFLOAT16)
        widen(from, half, BFLOAT16, to);
    else if (dtype == FLOAT16)
        widen(from, half, FLOAT16, to);
    else
        widen(from, half, FLOAT32, to);
}

INLINE void widen_weight(const RotateStore *p, const void *weight, int dtype, float *to) {
    widen(weight, p->store.key.dim, dtype, to);
    for (int64_t place = 0; place < p->store.key.dim; place++) to[place] += p->weight_offset;
}

INLINE void run_tokens(const RotateStore *p, const Rotation *rotation, int64_t begin, int64_t end, int dtype,
                       float *scratch) {
    const Room room = room_in(p, scratch);
    const int64_t item = item_bytes(dtype);
    const int is_normed = p->query_norm != NULL;
    if (is_normed) {
        widen_weight(p, p->query_norm, dtype, room.query_weight);
        widen_weight(p, p->key_norm, dtype, room.key_weight);
    }
    for (int64_t token = begin; token < end; token++) {
        widen_table(rotation->cos, token, rotation->cos_stride, p->half, (int)rotation->dtype, room.cos);
        widen_table(rotation->sin, token, rotation->sin_stride, p->half, (int)rotation->dtype, room.sin);
        void *query = (char *)p->query + token * p->query_stride * item;
        void *key = (char *)p->store.key.tokens + token * p->store.key.stride * item;
        rotate_heads(p, &room, query, p->num_heads, p->query_head_stride, is_normed ? room.query_weight : NULL, dtype);
        rotate_heads(p, &room, key, p->store.num_heads, p->store.key.head_stride, is_normed ? room.key_weight : NULL,
                     dtype);
        if (p->store.key.cache) store_token(&p->store, token, rotation->kv_positions[token], dtype, room.store);
    }
}

static int64_t tokens_of_task(const RotateStore *p) {
    const int64_t numbers = (p->num_heads + p->store.num_heads) * p->store.key.dim;
    return (NUMBERS_OF_TASK + numbers - 1) / numbers;
}

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    const int64_t tokens = tokens_of_task(problem);
    return (step->num_tokens + tokens - 1) / tokens;
}

static void run(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)num_threads;
    const RotateStore *p = problem;
    const Rotation *rotation = step->rotation + p->rotation_index;
    const int64_t tokens = tokens_of_task(p), begin = task * tokens;
    const int64_t end = begin + tokens < step->num_tokens ? begin + tokens : step->num_tokens;
    if (p->store.dtype == BFLOAT16)
        run_tokens(p, rotation, begin, end, BFLOAT16, scratch);
    else if (p->store.dtype == FLOAT16)
        run_tokens(p, rotation, begin, end, FLOAT16, scratch);
    else
        run_tokens(p, rotation, begin, end, FLOAT32, scratch);
}

const OpKind rotate_store_op = {"rotate_store", num_tasks, run, scratch_bytes};
