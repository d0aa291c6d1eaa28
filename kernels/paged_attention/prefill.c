/* Attention of sequences with several queries, the last tokens of each, over a paged cache.
 *
 * out[q, h] = sum over t of softmax_t(scale q[h] . k[t]) v[t]; what the options mean, kernels/paged_attention says;
 * native.py checks all sizes. The cache is read where it lies. A task is some neighbouring queries of a sequence with
 * the query heads of one key head; how many, follows from the step and the threads, and changes no bit.
 */

#include "tile.h"

typedef struct {
    int64_t heads;      /* query heads of a task */
    int64_t head_parts; /* tasks for each tile of queries */
    int64_t queries;    /* of a task */
    int64_t num_tasks;
} Plan;

static int64_t num_tiles(const Sequences *prefills, int64_t idx, int64_t queries) {
    return (prefills->num_queries[idx] + queries - 1) / queries;
}

static Plan plan_of(const Attention *p, const AttentionStep *step, int64_t num_threads) {
    const Sequences *prefills = &step->prefills;
    const int64_t group = p->num_heads / p->num_kv_heads, parts = (group + TILE_ROWS - 1) / TILE_ROWS;
    Plan plan = {.heads = (group + parts - 1) / parts};
    plan.head_parts = p->num_kv_heads * ((group + plan.heads - 1) / plan.heads);
    for (plan.queries = TILE_ROWS / plan.heads;; plan.queries = (plan.queries + 1) / 2) {
        plan.num_tasks = 0;
        for (int64_t idx = 0; idx < prefills->count; idx++)
            plan.num_tasks += num_tiles(prefills, idx, plan.queries) * plan.head_parts;
        /* Smaller tasks read the keys more often. */
        if (num_threads == 1 || plan.num_tasks >= 2 * num_threads || plan.queries * plan.heads <= ROWS ||
            plan.queries == 1)
            return plan;
    }
}

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    if (!step->attention || !step->attention->prefills.count) return 0;
    return plan_of(problem, step->attention, num_threads).num_tasks;
}

static int64_t scratch_bytes(const void *problem, const Step *step) {
    (void)step;
    return tile_floats(problem, TILE_ROWS) * (int64_t)sizeof(float);
}

static void run(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    const Attention *p = problem;
    const AttentionStep *sequences = step->attention;
    const Sequences *prefills = &sequences->prefills;
    const Plan plan = plan_of(p, sequences, num_threads);
    const int64_t part = task % plan.head_parts, parts_of_group = plan.head_parts / p->num_kv_heads;
    int64_t idx = 0, tile_idx = task / plan.head_parts;
    for (; tile_idx >= num_tiles(prefills, idx, plan.queries); idx++)
        tile_idx -= num_tiles(prefills, idx, plan.queries);
    /* The last queries see most keys: they come first. */
    const int64_t first = (num_tiles(prefills, idx, plan.queries) - 1 - tile_idx) * plan.queries;
    const int64_t group = p->num_heads / p->num_kv_heads, first_head = part % parts_of_group * plan.heads;
    const int64_t num_queries = prefills->num_queries[idx], context_len = prefills->context_lens[idx];
    Tile tile = {
        .p = p,
        .table = sequences->tables + prefills->sequences[idx] * sequences->table_width,
        .kv_head = part / parts_of_group,
        .first_head = part / parts_of_group * group + first_head,
        .heads = smaller(plan.heads, group - first_head),
        .token = prefills->tokens[idx] + first,
        .position = context_len - num_queries + first,
        .num_queries = smaller(plan.queries, num_queries - first),
    };
    tile_place(&tile, TILE_ROWS, scratch);
    tile_load(&tile);
    tile_clear(&tile, p->sinks);
    tile_attend(&tile, first_visible(p, tile.position) / TILE_KEYS * TILE_KEYS, tile.position + tile.num_queries);
    tile_write(&tile);
}

const OpKind attention_prefill_op = {"attention_prefill", num_tasks, run, scratch_bytes};
