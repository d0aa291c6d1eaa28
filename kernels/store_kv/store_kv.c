/* Writes keys and values to their KV positions. A task is a run of tokens; no two tokens have one position. */

#include "store.h"

enum { NUMBERS_OF_TASK = 16384 };

/* Mirrored by kernels/store_kv/native.py. */
typedef struct {
    Store store;
    const int64_t *kv_positions; /* [num_tokens] */
} StoreKv;

static int64_t tokens_of_task(const Store *p) {
    const int64_t numbers = p->num_heads * (p->key.dim + p->value.dim);
    return (NUMBERS_OF_TASK + numbers - 1) / numbers;
}

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    const int64_t tokens = tokens_of_task(&((const StoreKv *)problem)->store);
    return (step->num_tokens + tokens - 1) / tokens;
}

static int64_t scratch_bytes(const void *problem, const Step *step) {
    (void)step;
    return 4 * store_scratch(&((const StoreKv *)problem)->store);
}

static void run(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)num_threads;
    const StoreKv *p = problem;
    const int64_t tokens = tokens_of_task(&p->store), begin = task * tokens;
    const int64_t end = begin + tokens < step->num_tokens ? begin + tokens : step->num_tokens;
    for (int64_t token = begin; token < end; token++) {
        if (p->store.dtype == BFLOAT16)
            store_token(&p->store, token, p->kv_positions[token], BFLOAT16, scratch);
        else if (p->store.dtype == FLOAT16)
            store_token(&p->store, token, p->kv_positions[token], FLOAT16, scratch);
        else
            store_token(&p->store, token, p->kv_positions[token], FLOAT32, scratch);
    }
}

const OpKind store_kv_op = {"store_kv", num_tasks, run, scratch_bytes};
