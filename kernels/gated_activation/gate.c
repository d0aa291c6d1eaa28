/* y = activation(gate) * up for rows of gate and up side by side: the activation in float32, rounded to the dtype
 * before the product.
 *
 * A task is a block of rows by columns. Every number is by itself, so that no split changes a bit.
 */

#include "../native/numbers.h"

enum { COLUMNS = 1024, MOST_ROWS = 8 }; /* of a task */

/* As kernels/gated_activation/native.py numbers them. */
enum { SILU = 0, GELU = 1, GELU_TANH = 2 };

/* Mirrored by kernels/gated_activation/native.py. */
typedef struct {
    const void *x; /* [num_tokens, 2 width], the gate before up */
    void *y;       /* [num_tokens, width] */
    int64_t x_stride, y_stride, width;
    int64_t dtype; /* of both */
    int64_t activation;
} Gate;

/* The error function: 1 + erf is within 2^-21.6, four roundings; 1 from 4.05 on.
 * Below 1 the odd polynomial of Cephes' erff. Above, ln(1 - erf(x)) is nearly a parabola: minimax polynomial of degree 6
 * with the weight 1 - erf(x) over [0.95, 4.05], within 1.3e-9 of erf but for roundings. */
INLINE vec error_function(vec x) {
    const bits sign = (bits)x & 0x80000000u;
    const vec any_size = (vec)((bits)x ^ sign), size = choose(any_size > 4.05f, all(4.05f), any_size);
    const vec square = x * x;
    vec near = 7.8538615e-05f * square - 8.0101937e-04f;
    near = near * square + 5.1883277e-03f;
    near = near * square - 2.6853813e-02f;
    near = near * square + 1.1283585e-01f;
    near = near * square - 3.7612626e-01f;
    near = near * square + 1.1283791e+00f;
    vec power = 1.9150405e-04f * size - 2.9995400e-03f;
    power = power * size + 2.2051994e-02f;
    power = power * size - 1.0356689e-01f;
    power = power * size - 6.3760006e-01f;
    power = power * size - 1.1274260e+00f;
    power = power * size - 2.5644650e-04f;
    const vec far = 1.0f - exponential(power);
    return choose(size < 1.0f, near * x, (vec)((bits)far | sign));
}

/* Infinite and NaN gates give what torch's formulas give: silu and gelu of -inf are NaN. */
INLINE vec activated(vec x, int activation) {
    if (activation == GELU) return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    vec power = x;
    /* (1 + tanh(z)) / 2 is 1 / (1 + e^(-2 z)); z = sqrt(2 / pi) (x + 0.044715 x^3). */
    if (activation == GELU_TANH) power = 1.5957691f * (x + 0.044715f * (x * x * x));
    return x / (1.0f + exponential(-power));
}

INLINE vec in_dtype(vec value, int dtype) {
    if (dtype == BFLOAT16) return in_bfloat16(value);
    if (dtype == FLOAT16) return widened(narrowed(value));
    return value;
}

INLINE void gate_pair(const void *gate, const void *up, void *y, int64_t place, int64_t count, int dtype,
                      int activation) {
    vec gates[2], ups[2];
    if (count >= PAIR) {
        load_pair(gate, place, dtype, &gates[0], &gates[1]);
        load_pair(up, place, dtype, &ups[0], &ups[1]);
    } else {
        load_part(gate, place, count, dtype, &gates[0], &gates[1]);
        load_part(up, place, count, dtype, &ups[0], &ups[1]);
    }
    const vec first = in_dtype(activated(gates[0], activation), dtype) * ups[0];
    const vec second = in_dtype(activated(gates[1], activation), dtype) * ups[1];
    if (count >= PAIR)
        store_pair(y, place, dtype, first, second);
    else
        store_part(y, place, count, dtype, first, second);
}

INLINE void gate_rows(const Gate *p, int64_t first_row, int64_t last_row, int64_t begin, int64_t end, int dtype,
                      int activation) {
    const int64_t item = item_bytes(dtype), whole = begin + (end - begin) / PAIR * PAIR;
    for (int64_t row = first_row; row < last_row; row++) {
        const char *gate = (const char *)p->x + row * p->x_stride * item, *up = gate + p->width * item;
        void *y = (char *)p->y + row * p->y_stride * item;
        for (int64_t place = begin; place < whole; place += PAIR)
            gate_pair(gate, up, y, place, PAIR, dtype, activation);
        if (whole < end) gate_pair(gate, up, y, whole, end - whole, dtype, activation);
    }
}

INLINE void gate_rows_of(const Gate *p, int64_t first_row, int64_t last_row, int64_t begin, int64_t end, int dtype) {
    if (p->activation == SILU)
        gate_rows(p, first_row, last_row, begin, end, dtype, SILU);
    else if (p->activation == GELU)
        gate_rows(p, first_row, last_row, begin, end, dtype, GELU);
    else
        gate_rows(p, first_row, last_row, begin, end, dtype, GELU_TANH);
}

/* Few rows are cut finer, so that every thread has some. */
static int64_t rows_of_task(const Step *step) {
    const int64_t rows = step->num_tokens / 16;
    return rows < 1 ? 1 : rows > MOST_ROWS ? MOST_ROWS : rows;
}

static int64_t num_column_blocks(const Gate *p) { return (p->width + COLUMNS - 1) / COLUMNS; }

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    const int64_t rows = rows_of_task(step);
    return (step->num_tokens + rows - 1) / rows * num_column_blocks(problem);
}

static void run(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)num_threads, (void)scratch;
    const Gate *p = problem;
    const int64_t blocks = num_column_blocks(p), rows = rows_of_task(step);
    const int64_t first_row = task / blocks * rows, begin = task % blocks * COLUMNS;
    const int64_t last_row = first_row + rows < step->num_tokens ? first_row + rows : step->num_tokens;
    const int64_t end = begin + COLUMNS < p->width ? begin + COLUMNS : p->width;
    if (p->dtype == BFLOAT16)
        gate_rows_of(p, first_row, last_row, begin, end, BFLOAT16);
    else if (p->dtype == FLOAT16)
        gate_rows_of(p, first_row, last_row, begin, end, FLOAT16);
    else
        gate_rows_of(p, first_row, last_row, begin, end, FLOAT32);
}

const OpKind gate_op = {"gate", num_tasks, run, NULL};
