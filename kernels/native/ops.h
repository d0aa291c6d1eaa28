/* What every native op is made of, and what one run of several ops shares.
 *
 * An op is cut into tasks that any thread may take. A task gives the same bits whatever thread runs it, whatever the
 * other tasks of its op are doing, and however many threads there are. pool.c runs lists of ops.
 */

#ifndef MOTET_OPS_H
#define MOTET_OPS_H

#include <stdint.h>

/* Element types, as kernels/native/types.py numbers them. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8 = 3 /* e4m3fn */ };

/* What the ops of one run share. A part that no op of the run reads is NULL. Mirrored by kernels/native/program.py. */
typedef struct {
    int64_t num_tokens;                      /* rows of every activation */
    const struct LoraTokens *lora;           /* which token has which adapter; NULL: no token has one */
    const struct Rotation *rotation;         /* where each token's heads are turned to and stored */
    const struct AttentionStep *attention;   /* the sequences of the step */
} Step;

typedef struct {
    const char *name;
    /* 0: nothing to do in this step. */
    int64_t (*num_tasks)(const void *problem, const Step *step, int64_t num_threads);
    /* `scratch` has scratch_bytes(problem, step) bytes on a cache line, of this thread alone, with any contents. */
    void (*run)(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch);
    int64_t (*scratch_bytes)(const void *problem, const Step *step); /* NULL: none */
} OpKind;

typedef struct {
    const OpKind *kind;
    const void *problem;
    int64_t is_open; /* the next op may begin before this one has ended: neither writes what the other uses */
} Op;

#endif
