/* Attention of one query per sequence over a paged cache.
 *
 * out[h] = sum over t of softmax_t(scale q[h] . k[t]) v[t], the softmax taken in chunks of keys as flash attention does
 * (Dao et al. 2022), everything in float32. What the options mean, kernels/paged_attention says; native.py checks all
 * sizes.
 *
 * A sequence is summed in parts of its keys, whose borders follow from its length alone; what the parts give is joined
 * in their order. A task is one sequence, or one part of a sequence that would keep a thread longer than others have
 * work for, or some of the key heads of these: that follows from the batch and the threads, and changes no bit.
 */

#include "stream.h"
#include "tile.h"

enum {
    PART_KEYS = 512,
    MOST_PARTS = 64,       /* of one sequence */
    PART_SLOTS = 256,      /* parts of one step that tasks of their own sum */
    SMALL_BYTES = 32 << 10, /* below so many bytes of keys and values one thread is done before others have begun */
    /* Query heads of a key head from which on a tile of them is faster than a stream (benchmarks/LOG.md). A stream
     * converts numbers of FP8 for every two of them. */
    TILE_GROUP = 16,
    TILE_GROUP_FLOAT8 = 5
};

/* Whether tile.h takes these sizes, else stream.h. */
static int uses_tile(const Attention *p) {
    const int64_t group = p->num_heads / p->num_kv_heads;
    const int64_t least = p->cache_dtype == FLOAT8 ? TILE_GROUP_FLOAT8 : TILE_GROUP;
    return group >= least || p->block_size % 4 || p->block_size > CHUNK;
}

/* Whether the sums are in the order of pairs of bfloat16. */
static int are_parted(const Attention *p) { return uses_tile(p) ? is_parted(p) : p->cache_dtype == BFLOAT16; }

static void clear(const Task *task, Sums sums, const float *sinks) {
    for (int64_t head = 0; head < task->num_heads * task->group; head++) {
        sums.highest[head] = sinks ? sinks[task->first_head * task->group + head] : -INFINITE;
        sums.total[head] = sinks ? 1.0f : 0.0f;
    }
    memset(sums.mixed, 0, sizeof(float) * (size_t)(task->num_heads * task->group * task->value_width));
}

/* Adds the sums of a part to those of the parts before it. */
static void join(const Task *task, Sums part) {
    const Sums whole = task->whole;
    for (int64_t head = 0; head < task->num_heads * task->group; head++) {
        const float highest = larger_of(part.highest[head], whole.highest[head]);
        const float shift = highest == -INFINITE ? 0.0f : highest;
        const float before = exponential_of(whole.highest[head] - shift);
        const float added = exponential_of(part.highest[head] - shift);
        whole.total[head] = whole.total[head] * before + part.total[head] * added;
        whole.highest[head] = highest;
        float *to = whole.mixed + head * task->value_width;
        const float *from = part.mixed + head * task->value_width;
        for (int64_t place = 0; place < task->value_width; place += LANES)
            store(to + place, load(to + place) * before + load(from + place) * added);
    }
}

static void write_output(const Task *task) {
    const Attention *p = task->p;
    char *row = (char *)p->output + task->token * p->output_stride * item_bytes((int)p->dtype);
    const float scale = p->value_scale * scale_of_codes(p);
    for (int64_t head = 0; head < task->num_heads * task->group; head++) {
        const int64_t to = (task->first_head * task->group + head) * p->value_dim;
        const float *mixed = task->whole.mixed + head * task->value_width;
        const float total = task->whole.total[head];
        EACH_PAIR(p->value_dim, {
            const vec first = load(mixed + place) / total * scale, second = load(mixed + place + LANES) / total * scale;
            store_output(row, to + place, count, (int)p->dtype, are_parted(p), first, second);
        })
    }
}

static int64_t heads_before(const Attention *p) { return (p->num_heads + LANES - 1) / LANES * LANES; }

static int64_t slot_floats(const Attention *p) { return 2 * heads_before(p) + p->num_heads * padded_dim(p->value_dim); }

/* Floats that Attention.parts has room for, zeros at first. */
int64_t motet_attention_part_floats(const Attention *p) {
    return PART_SLOTS * (p->num_kv_heads + slot_floats(p)) + LANES;
}

/* Where the tasks of a part leave its sums for `join`. */
static Sums sums_of_slot(const Task *task, int64_t slot) {
    const Attention *p = task->p;
    const int64_t head = task->first_head * task->group;
    float *from = p->parts + PART_SLOTS * p->num_kv_heads + slot * slot_floats(p);
    return (Sums){from + head, from + heads_before(p) + head, from + 2 * heads_before(p) + head * task->value_width};
}

/* Keys of a part. */
static int64_t part_keys(const Attention *p, int64_t num_keys) {
    const int64_t step = uses_tile(p) ? TILE_KEYS : CHUNK / p->block_size * p->block_size;
    const int64_t wanted = larger(PART_KEYS, (num_keys + MOST_PARTS - 1) / MOST_PARTS);
    return (wanted + step - 1) / step * step;
}

/* First key of a sequence's first part. */
static int64_t start_of(const Attention *p, int64_t context_len) {
    const int64_t step = uses_tile(p) ? TILE_KEYS : p->block_size;
    return first_visible(p, context_len - 1) / step * step;
}

static int64_t num_parts(const Attention *p, int64_t context_len) {
    const int64_t num_keys = context_len - start_of(p, context_len), keys = part_keys(p, num_keys);
    return (num_keys + keys - 1) / keys;
}

typedef struct {
    int64_t num_split;  /* sequences whose parts are tasks of their own: the first ones */
    int64_t num_parts;  /* all of these sequences' */
    int64_t head_parts; /* tasks of each part and of each other sequence; divides the number of key heads */
    int64_t num_tasks;  /* 1: all sequences, one after the other */
} Plan;

static Plan plan_of(const Attention *p, const AttentionStep *step, int64_t num_threads) {
    const Sequences *decodes = &step->decodes;
    int64_t num_keys = 0;
    for (int64_t idx = 0; idx < decodes->count; idx++)
        num_keys += p->window ? smaller(decodes->context_lens[idx], p->window) : decodes->context_lens[idx];
    Plan plan = {.head_parts = 1, .num_tasks = decodes->count > 0};
    const int64_t bytes = p->num_kv_heads * (p->key_dim + p->value_dim) * item_bytes((int)p->cache_dtype);
    if (num_threads == 1 || num_keys * bytes < SMALL_BYTES) return plan;
    const int64_t most_keys = larger(PART_KEYS, num_keys / (2 * num_threads));
    for (; plan.num_split < decodes->count; plan.num_split++) {
        const int64_t context_len = decodes->context_lens[plan.num_split];
        const int64_t parts = num_parts(p, context_len);
        if (context_len - start_of(p, context_len) <= most_keys || plan.num_parts + parts > PART_SLOTS) break;
        plan.num_parts += parts;
    }
    const int64_t units = plan.num_parts + decodes->count - plan.num_split;
    const int64_t wanted = smaller((2 * num_threads + units - 1) / units, p->num_kv_heads);
    for (plan.head_parts = wanted; p->num_kv_heads % plan.head_parts; plan.head_parts++) {}
    plan.num_tasks = units * plan.head_parts;
    return plan;
}

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    if (!step->attention || !step->attention->decodes.count) return 0;
    return plan_of(problem, step->attention, num_threads).num_tasks;
}

static int64_t scratch_bytes(const void *problem, const Step *step) {
    (void)step;
    const Attention *p = problem;
    const int64_t mixed = p->num_heads * padded_dim(p->value_dim), group = p->num_heads / p->num_kv_heads;
    const int64_t stream = p->num_heads * (padded_dim(p->key_dim) + CHUNK) + 2 * CHUNK;
    return (4 * heads_before(p) + 2 * mixed + (uses_tile(p) ? tile_floats(p, group) : stream)) * (int64_t)sizeof(float);
}

static Task task_of(const Attention *p, const AttentionStep *step, int64_t decode, int64_t first_head, int64_t num_heads,
                    float *scratch) {
    const Sequences *decodes = &step->decodes;
    const int64_t end_key = decodes->context_lens[decode], group = p->num_heads / p->num_kv_heads;
    const int64_t heads = num_heads * group, padded = (heads + LANES - 1) / LANES * LANES;
    Task task = {
        .p = p,
        .table = step->tables + decodes->sequences[decode] * step->table_width,
        .token = decodes->tokens[decode],
        .first_key = first_visible(p, end_key - 1),
        .end_key = end_key,
        .first_head = first_head,
        .num_heads = num_heads,
        .group = group,
        .key_width = padded_dim(p->key_dim),
        .value_width = padded_dim(p->value_dim),
    };
    float **rows[] = {&task.part.highest, &task.part.total, &task.whole.highest, &task.whole.total};
    for (int row = 0; row < 4; row++, scratch += padded) *rows[row] = scratch;
    task.part.mixed = scratch;
    task.whole.mixed = task.part.mixed + heads * task.value_width;
    task.tile = task.whole.mixed + heads * task.value_width;
    task.scales = task.tile;
    task.scores = task.scales + 2 * CHUNK;
    task.query = task.scores + heads * CHUNK;
    return task;
}

/* Sets task->part to the sums over the keys [start, end). */
static void attend_in_tiles(const Task *task, int64_t start, int64_t end) {
    for (int64_t head = 0; head < task->num_heads; head++) {
        Tile tile = {
            .p = task->p,
            .table = task->table,
            .kv_head = task->first_head + head,
            .first_head = (task->first_head + head) * task->group,
            .heads = task->group,
            .token = task->token,
            .position = task->end_key - 1,
            .num_queries = 1,
        };
        tile_place(&tile, task->group, task->tile);
        tile_load(&tile);
        tile_clear(&tile, NULL);
        tile_attend(&tile, start, end);
        const int64_t first = head * task->group, width = task->value_width;
        memcpy(task->part.highest + first, tile.highest, sizeof(float) * (size_t)task->group);
        memcpy(task->part.mixed + first * width, tile.mixed, sizeof(float) * (size_t)(task->group * width));
        for (int64_t row = 0; row < task->group; row++)
            task->part.total[first + row] = sum_of(load(tile.total + row * LANES));
    }
}

/* Sets task->part to the sums of one of the sequence's parts. */
INLINE void sum_part(const Task *task, int64_t part, int dtype) {
    const int64_t start = start_of(task->p, task->end_key), keys = part_keys(task->p, task->end_key - start);
    const int64_t first = start + part * keys, end = smaller(first + keys, task->end_key);
    if (uses_tile(task->p)) {
        attend_in_tiles(task, first, end);
        return;
    }
    clear(task, task->part, NULL);
    attend_part(task, first, end, dtype);
}

/* Not inlined: in three places they would take the compiler four times as long. */
#define SUM_PART(name, dtype) \
    static __attribute__((noinline)) void name(const Task *task, int64_t part) { sum_part(task, part, dtype); }
SUM_PART(sum_float32_part, FLOAT32)
SUM_PART(sum_bfloat16_part, BFLOAT16)
SUM_PART(sum_float16_part, FLOAT16)
SUM_PART(sum_float8_part, FLOAT8)

INLINE void sum_part_of(const Task *task, int64_t part, int dtype) {
    if (dtype == FLOAT32) sum_float32_part(task, part);
    else if (dtype == BFLOAT16) sum_bfloat16_part(task, part);
    else if (dtype == FLOAT16) sum_float16_part(task, part);
    else sum_float8_part(task, part);
}

INLINE void run_sequence(Task task, int dtype) {
    if (!uses_tile(task.p)) load_query(&task, dtype);
    clear(&task, task.whole, task.p->sinks);
    const int64_t parts = num_parts(task.p, task.end_key);
    for (int64_t part = 0; part < parts; part++) {
        sum_part_of(&task, part, dtype);
        join(&task, task.part);
    }
    write_output(&task);
}

/* One of the sequence's parts, which are the slots from first_slot on; who comes last joins them. */
INLINE void run_part(Task task, int64_t part, int64_t first_slot, int dtype) {
    task.part = sums_of_slot(&task, first_slot + part);
    if (!uses_tile(task.p)) load_query(&task, dtype);
    sum_part_of(&task, part, dtype);
    const int64_t parts = num_parts(task.p, task.end_key);
    int32_t *arrived = (int32_t *)task.p->parts + first_slot * task.p->num_kv_heads + task.first_head;
    if (__atomic_add_fetch(arrived, 1, __ATOMIC_ACQ_REL) < parts) return;
    *arrived = 0;
    clear(&task, task.whole, task.p->sinks);
    for (int64_t slot = 0; slot < parts; slot++) join(&task, sums_of_slot(&task, first_slot + slot));
    write_output(&task);
}

INLINE void run_task(const Attention *p, const AttentionStep *step, int64_t task, int64_t num_threads, float *scratch,
                     int dtype) {
    const Plan plan = plan_of(p, step, num_threads);
    if (plan.num_tasks == 1) {
        for (int64_t decode = 0; decode < step->decodes.count; decode++)
            run_sequence(task_of(p, step, decode, 0, p->num_kv_heads, scratch), dtype);
        return;
    }
    const int64_t num_heads = p->num_kv_heads / plan.head_parts, first_head = task % plan.head_parts * num_heads;
    int64_t unit = task / plan.head_parts, decode = 0, first_slot = 0;
    for (; decode < plan.num_split; decode++) {
        const int64_t parts = num_parts(p, step->decodes.context_lens[decode]);
        if (unit < parts) break;
        unit -= parts;
        first_slot += parts;
    }
    if (decode < plan.num_split)
        run_part(task_of(p, step, decode, first_head, num_heads, scratch), unit, first_slot, dtype);
    else
        run_sequence(task_of(p, step, decode + unit, first_head, num_heads, scratch), dtype);
}

#define RUN(name, dtype)                                                                                             \
    static __attribute__((noinline)) void name(const Attention *p, const AttentionStep *step, int64_t task,          \
                                               int64_t num_threads, float *scratch) {                                \
        run_task(p, step, task, num_threads, scratch, dtype);                                                        \
    }
RUN(run_float32, FLOAT32)
RUN(run_bfloat16, BFLOAT16)
RUN(run_float16, FLOAT16)
RUN(run_float8, FLOAT8)

static void run(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    const Attention *p = problem;
    static void (*const runs[])(const Attention *, const AttentionStep *, int64_t, int64_t, float *) = {
        [FLOAT32] = run_float32, [BFLOAT16] = run_bfloat16, [FLOAT16] = run_float16, [FLOAT8] = run_float8};
    runs[p->cache_dtype](p, step->attention, task, num_threads, scratch);
}

const OpKind attention_decode_op = {"attention_decode", num_tasks, run, scratch_bytes};
