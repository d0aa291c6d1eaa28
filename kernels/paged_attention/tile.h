/* Attention of many rows over the same keys, for both ops: see tile.c. */

#ifndef MOTET_ATTENTION_TILE_H
#define MOTET_ATTENTION_TILE_H

#include "attention.h"

enum {
    ROWS = LANES == 16 ? 12 : 4, /* of a group */
    TILE_ROWS = 96,
    TILE_KEYS = 128,
    UNIT = 4 /* bytes of one turn of a product: a float32, or two bfloat16 */
};

typedef struct {
    const Attention *p;
    const int32_t *table;
    int64_t kv_head, first_head, heads;   /* query heads of the key head */
    int64_t token, position, num_queries; /* the first query's row, and its place in the sequence */
    int64_t value_width;
    char *query;             /* [num_queries * heads] rows of turns */
    char *keys, *values;     /* panels of PAIR keys, and of PAIR numbers of the values */
    float *scores;           /* [ROWS, TILE_KEYS]; a weight takes the place of its score */
    float *highest, *total;  /* [rows], [rows, LANES] */
    float *mixed;            /* [rows, value_width] */
    float *scales;           /* [2, TILE_KEYS]: of the keys' scores and of the values' weights */
    int64_t *slots;          /* [2, TILE_KEYS]: where the tile's keys lie in the cache, and the next tile's */
} Tile;

#define HIDDEN __attribute__((visibility("hidden")))

/* Floats of scratch space that a tile of so many rows needs, and where its parts lie in that. */
HIDDEN int64_t tile_floats(const Attention *p, int64_t rows);
HIDDEN void tile_place(Tile *tile, int64_t rows, float *scratch);

HIDDEN void tile_load(const Tile *tile); /* the queries */
HIDDEN void tile_clear(const Tile *tile, const float *sinks);

/* Adds the keys from `start` to `end` that the rows see to their sums; `start` follows from the sequence alone. */
HIDDEN void tile_attend(const Tile *tile, int64_t start, int64_t end);

HIDDEN void tile_write(const Tile *tile);

/* Whether numbers of `mixed` are in the order of pairs of bfloat16. */
INLINE int is_parted(const Attention *p) { return p->cache_dtype == BFLOAT16 || is_paired(p); }

#endif
