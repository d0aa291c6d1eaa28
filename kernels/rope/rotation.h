/* Where a step's heads are turned to, and stored: the same for all layers. */

#ifndef MOTET_ROTATION_H
#define MOTET_ROTATION_H

#include <stdint.h>

/* Step.rotation points to one, or to several for a model whose layers rotate in several ways. Mirrored by
 * kernels/rope/native.py. */
typedef struct Rotation {
    const void *cos, *sin;         /* [num_tokens, half]: row t is token t's */
    const int64_t *kv_positions;   /* [num_tokens], -1: not stored; NULL where nothing is */
    int64_t cos_stride, sin_stride; /* between rows, in elements */
    int64_t dtype;                 /* of both tables */
} Rotation;

#endif
