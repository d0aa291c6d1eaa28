/* y = x @ weight.T + bias for weights in panels, from one row of x to thousands.
 *
 * A panel holds PAIR outputs, in the order of a pair, input by input: [in][PAIR], of bfloat16 [in / 2][PAIR][2], which
 * is what the CPU's own bfloat16 product takes. kernels/linear/panels.py makes them. A tile is up to ROWS rows of x by
 * one panel, whose sums stay in registers; each output is one sum over the inputs in their order, so that no bit depends
 * on the other rows. While a part of a panel is multiplied, the one behind it is fetched.
 *
 * A CPU that multiplies bfloat16 reads rows of bfloat16 as they are, and multiplies a whole panel at a time. All other
 * products are of float32 and of a block of inputs at a time: its part of x is widened once for all panels of a task,
 * and sums wait in scratch space for the next block. In place, rows whose length is a power of two would push each other
 * out of the nearest cache.
 */

#include <stddef.h>

#include "../native/rows.h"
#include "linear.h"

enum { ROWS = LANES == 16 ? 12 : 4, ROW_BLOCK = 16 * ROWS, PANELS_OF_TASK = 4 };
/* PART_BYTES: how much of a panel several tiles multiply before the next part; so it stays in the nearest cache. */
enum { PART_BYTES = 16384, LONG_BLOCK = 1024, BLOCK_STRIDE = LONG_BLOCK + LANES /* what widen() may write */ };

/* Where the part of a panel that is wanted next lies, and how many bytes of it each turn of this tile fetches. */
typedef struct {
    const char *from;
    int64_t step;
} Ahead;

INLINE void fetch(Ahead *ahead) {
    if (!ahead->step) return;
    __builtin_prefetch(ahead->from, 0, 2);
    if (ahead->step > LINE) __builtin_prefetch(ahead->from + LINE, 0, 2);
    ahead->from += ahead->step;
}

/* Rows of x by a part of one panel. */
typedef struct {
    const Linear *problem;
    const void *x;       /* rows of bfloat16 as they are, or of float32 BLOCK_STRIDE apart */
    const char *panel;   /* from the part's first input on */
    int64_t inputs;      /* of the part */
    int64_t first_output;
    void *y;             /* NULL: sums are not complete */
    float *sums;         /* [rows][PAIR], from the parts before, and for those behind; NULL where this part is all */
    int is_first;
    Ahead ahead;
} Tile;

#define EACH_ROW _Pragma("GCC unroll 12") for (int row = 0; row < rows; row++)

/* The sums of a tile, with what is added to them by this part. */
INLINE void add_products(const Tile *tile, vec sums[ROWS][2], int rows, int dtype) {
    const char *panel = tile->panel;
    Ahead ahead = tile->ahead;
#ifdef __AVX512BF16__
    if (dtype == BFLOAT16) {
        const uint16_t *values = tile->x;
        const int64_t in = tile->inputs, stride = tile->problem->x_stride;
        for (int64_t idx = 0; idx < in / 2; idx++) {
            const char *both = panel + idx * PAIR * 4;
            fetch(&ahead);
            const __m512bh one = (__m512bh)_mm512_loadu_si512(both), other = (__m512bh)_mm512_loadu_si512(both + 64);
            EACH_ROW {
                int32_t two;
                memcpy(&two, values + row * stride + 2 * idx, sizeof two);
                const __m512bh factor = (__m512bh)_mm512_set1_epi32(two);
                sums[row][0] = (vec)_mm512_dpbf16_ps((__m512)sums[row][0], factor, one);
                sums[row][1] = (vec)_mm512_dpbf16_ps((__m512)sums[row][1], factor, other);
            }
        }
        if (in % 2) {
            bits one, other;
            memcpy(&one, panel + in / 2 * PAIR * 4, sizeof one);
            memcpy(&other, panel + in / 2 * PAIR * 4 + sizeof one, sizeof other);
            EACH_ROW {
                const float factor = load_one(values + row * stride, in - 1, BFLOAT16);
                sums[row][0] += factor * (vec)(one << 16);
                sums[row][1] += factor * (vec)(other << 16);
            }
        }
        return;
    }
#endif
    const float *x = tile->x;
    if (dtype == BFLOAT16) { /* behind an odd number of inputs x and the panel must have zeros */
        for (int64_t idx = 0; idx < tile->inputs; idx += 2) {
            bits one, other;
            memcpy(&one, panel + idx * PAIR * 2, sizeof one);
            memcpy(&other, panel + idx * PAIR * 2 + sizeof one, sizeof other);
            fetch(&ahead);
            const vec first = in_register((vec)(one << 16)), second = in_register((vec)(other << 16));
            EACH_ROW {
                const float factor = x[row * BLOCK_STRIDE + idx];
                sums[row][0] += factor * first;
                sums[row][1] += factor * second;
            }
            const vec third = in_register((vec)(one & 0xffff0000u)), fourth = in_register((vec)(other & 0xffff0000u));
            EACH_ROW {
                const float factor = x[row * BLOCK_STRIDE + idx + 1];
                sums[row][0] += factor * third;
                sums[row][1] += factor * fourth;
            }
        }
        return;
    }
    for (int64_t idx = 0; idx < tile->inputs; idx++) {
        fetch(&ahead);
        vec one, other;
        load_pair(panel, idx * PAIR, dtype, &one, &other);
        if (dtype != FLOAT32) { /* without it GCC makes two loops of float32's, with and without fetching: faster */
            one = in_register(one);
            other = in_register(other);
        }
        EACH_ROW {
            const float factor = x[row * BLOCK_STRIDE + idx];
            sums[row][0] += factor * one;
            sums[row][1] += factor * other;
        }
    }
}

INLINE void multiply_tile(const Tile *tile, int rows, int dtype) {
    vec sums[ROWS][2];
    if (tile->is_first)
        EACH_ROW sums[row][0] = sums[row][1] = (vec){0};
    else
        EACH_ROW {
            sums[row][0] = load(tile->sums + row * PAIR);
            sums[row][1] = load(tile->sums + row * PAIR + LANES);
        }
    add_products(tile, sums, rows, dtype);
    if (!tile->y) {
        EACH_ROW {
            store(tile->sums + row * PAIR, sums[row][0]);
            store(tile->sums + row * PAIR + LANES, sums[row][1]);
        }
        return;
    }
    const Linear *p = tile->problem;
    const int64_t first_output = tile->first_output, count = p->out - first_output;
    if (p->bias) {
        vec one, other;
        if (count >= PAIR)
            load_pair(p->bias, first_output, dtype, &one, &other);
        else
            load_part(p->bias, first_output, count, dtype, &one, &other);
        EACH_ROW {
            sums[row][0] += one;
            sums[row][1] += other;
        }
    }
    EACH_ROW {
        const int64_t place = row * p->y_stride + first_output;
        if (count >= PAIR)
            store_pair(tile->y, place, dtype, sums[row][0], sums[row][1]);
        else
            store_part(tile->y, place, count, dtype, sums[row][0], sums[row][1]);
    }
}

#define TILE(count) \
    case count: multiply_tile(tile, count, dtype); return;

/* Every number of rows is a loop of its own, so that its sums are registers. */
INLINE void multiply_rows(const Tile *tile, int64_t rows, int dtype) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4)
#if defined(__AVX512F__)
        TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
}

static __attribute__((noinline)) void multiply_bfloat16(const Tile *tile, int64_t rows) {
    multiply_rows(tile, rows, BFLOAT16);
}

static __attribute__((noinline)) void multiply_float16(const Tile *tile, int64_t rows) {
    multiply_rows(tile, rows, FLOAT16);
}

static __attribute__((noinline)) void multiply_float32(const Tile *tile, int64_t rows) {
    multiply_rows(tile, rows, FLOAT32);
}

static int64_t num_row_blocks(const Step *step) { return (step->num_tokens + ROW_BLOCK - 1) / ROW_BLOCK; }

static int64_t num_panels(const Linear *p) { return (p->out + PAIR - 1) / PAIR; }

static int64_t num_panel_groups(const Linear *p) { return (num_panels(p) + PANELS_OF_TASK - 1) / PANELS_OF_TASK; }

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    return num_row_blocks(step) * num_panel_groups(problem);
}

static int is_widened(const Linear *p) { return !has_pairs((int)p->dtype); }

/* What a task has: rows of x from `begin` on, and panels from `first` on. */
typedef struct {
    int64_t begin, num_rows, num_tiles, first, num_panels;
    int is_by_panel; /* all blocks of a panel, then the next panel: the order in memory. Else a block of all panels */
    int64_t block, num_blocks; /* of the inputs */
} Task;

static Task task_of(const Linear *p, const Step *step, int64_t index) {
    const int64_t groups = num_panel_groups(p), first = index % groups * PANELS_OF_TASK;
    const int64_t begin = index / groups * ROW_BLOCK;
    const int64_t rows = step->num_tokens - begin, panels = num_panels(p) - first;
    Task task = {.begin = begin, .first = first};
    task.num_rows = rows < ROW_BLOCK ? rows : ROW_BLOCK;
    task.num_panels = panels < PANELS_OF_TASK ? panels : PANELS_OF_TASK;
    task.num_tiles = (task.num_rows + ROWS - 1) / ROWS;
    task.is_by_panel = task.num_tiles == 1;
    const int64_t most = task.is_by_panel ? LONG_BLOCK : PART_BYTES / (PAIR * item_bytes((int)p->dtype));
    task.num_blocks = is_widened(p) && p->in > most ? (p->in + most - 1) / most : 1;
    const int64_t share = (p->in + task.num_blocks - 1) / task.num_blocks;
    task.block = (share + LANES - 1) / LANES * LANES;
    return task;
}

static int64_t widened_floats(const Linear *p, const Task *task) {
    if (!is_widened(p)) return 0;
    return task->num_rows * BLOCK_STRIDE * (task->is_by_panel ? task->num_blocks : 1);
}

/* The first tasks have the most rows. The last rows may still take more: few rows are widened as a whole. */
static int64_t scratch_bytes(const void *problem, const Step *step) {
    const Linear *p = problem;
    const int64_t blocks = num_row_blocks(step);
    if (!is_widened(p) || !num_tasks(p, step, 1)) return 0;
    const Task first = task_of(p, step, 0), last = task_of(p, step, (blocks - 1) * num_panel_groups(p));
    const int64_t some = widened_floats(p, &first), other = widened_floats(p, &last);
    const int64_t floats = (some > other ? some : other) + first.num_rows * first.num_panels * PAIR;
    return floats * (int64_t)sizeof(float);
}

/* The part of a panel that the task multiplies at a turn. */
typedef struct {
    int64_t panel, block; /* the panel counts from the task's first */
    const char *values;
    int64_t inputs;
} Part;

static Part part_of(const Linear *p, const Task *task, int64_t turn) {
    Part part = {turn % task->num_panels, turn / task->num_panels, NULL, p->in};
    if (task->is_by_panel) part = (Part){turn / task->num_blocks, turn % task->num_blocks, NULL, p->in};
    const int64_t first_input = part.block * task->block, inputs = p->dtype == BFLOAT16 ? (p->in + 1) / 2 * 2 : p->in;
    const int64_t place = (task->first + part.panel) * inputs + first_input;
    part.values = (const char *)p->panels + place * PAIR * item_bytes((int)p->dtype);
    if (task->num_blocks > 1) part.inputs = p->in - first_input < task->block ? p->in - first_input : task->block;
    return part;
}

/* What this thread is likely to multiply next: while threads are equally fast, each takes every num_threads-th task. */
static Part part_after(const Linear *p, const Step *step, const Task *task, int64_t turn, int64_t next_task) {
    if (turn + 1 < task->num_panels * task->num_blocks) return part_of(p, task, turn + 1);
    if (next_task >= num_tasks(p, step, 1)) return (Part){.values = NULL};
    const Task next = task_of(p, step, next_task);
    return part_of(p, &next, 0);
}

static void run(const void *problem, const Step *step, int64_t index, int64_t num_threads, void *scratch) {
    const Linear *p = problem;
    const Task task = task_of(p, step, index);
    const int dtype = (int)p->dtype;
    const int64_t item = item_bytes(dtype), num_rows = task.num_rows, num_tiles = task.num_tiles;
    const char *x = (const char *)p->x + task.begin * p->x_stride * item;
    char *y = (char *)p->y + task.begin * p->y_stride * item;
    float *const widened = scratch, *const sums = widened + widened_floats(p, &task);
    for (int64_t turn = 0; turn < task.num_panels * task.num_blocks; turn++) {
        const Part part = part_of(p, &task, turn), next = part_after(p, step, &task, turn, index + num_threads);
        float *const rows = widened + (task.is_by_panel ? part.block * num_rows * BLOCK_STRIDE : 0);
        if (is_widened(p) && part.panel == 0)
            for (int64_t row = 0; row < num_rows; row++) {
                const char *from = x + (row * p->x_stride + part.block * task.block) * item;
                widen(from, part.inputs, dtype, rows + row * BLOCK_STRIDE);
            }
        Tile tile = {
            .problem = p,
            .panel = part.values,
            .inputs = part.inputs,
            .first_output = (task.first + part.panel) * PAIR,
            .is_first = part.block == 0,
            .ahead = {part.values, 0},
        };
        /* The tiles share the fetching of the next part. */
        const int64_t fetches = dtype == BFLOAT16 ? part.inputs / 2 : part.inputs;
        if (next.values && fetches) tile.ahead = (Ahead){next.values, next.inputs * PAIR * item / num_tiles / fetches};
        for (int64_t row = 0, idx = 0; row < num_rows; idx++) {
            const int64_t count = (num_rows - row + num_tiles - idx - 1) / (num_tiles - idx);
            tile.x = is_widened(p) ? (const void *)(rows + row * BLOCK_STRIDE) : x + row * p->x_stride * item;
            tile.sums = task.num_blocks > 1 ? sums + (part.panel * num_rows + row) * PAIR : NULL;
            tile.y = part.block + 1 < task.num_blocks ? NULL : y + row * p->y_stride * item;
            if (dtype == BFLOAT16)
                multiply_bfloat16(&tile, count);
            else if (dtype == FLOAT16)
                multiply_float16(&tile, count);
            else
                multiply_float32(&tile, count);
            tile.ahead.from += tile.ahead.step * fetches;
            row += count;
        }
    }
}

const OpKind linear_op = {"linear", num_tasks, run, scratch_bytes};
