/* What both products of rows with a weight are given. */

#ifndef MOTET_LINEAR_H
#define MOTET_LINEAR_H

#include <stdint.h>

/* Mirrored by kernels/linear/native.py. */
typedef struct {
    const void *x;      /* [num_tokens, in], rows x_stride elements apart */
    const void *panels; /* [ceil(out / PAIR)] panels; of plain_linear the weight [out, in] itself */
    const void *bias;   /* [out] in the dtype, or NULL */
    void *y;            /* [num_tokens, out], rows y_stride elements apart */
    int64_t x_stride, y_stride, in, out;
    int64_t dtype; /* of all of them */
} Linear;

#endif
