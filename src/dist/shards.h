/* Which rows and keys lie where, and what rows see of them: the rules of acr_placement, without memory or transfers. */
#ifndef ACR_DIST_SHARDS_H
#define ACR_DIST_SHARDS_H

#include <acromion_nccl.h>

/* What a schedule knows of the sequences. */
typedef struct dist_sequences {
    int64_t q_len, kv_len;
    int ranks;
    acr_placement placement;
    int is_causal;
    int64_t diagonal;    /* row i stands at key i + diagonal; >= 0 with a mask */
    int64_t window_left; /* 0 = none */
} dist_sequences;

/* Rows of a rank that follow each other there and in the sequence, and that see keys in one of three ways: all of a
 * chunk of keys, none, or up to their position in it. */
typedef struct dist_piece {
    int64_t row, rows; /* the first among the rank's, and how many */
    int64_t position;  /* of the first */
} dist_piece;

/* Keys of one block, and whether each row's end at its position: the last row's at the last key. */
typedef struct dist_keys {
    int64_t first, count; /* count 0: none is seen */
    int is_causal;
} dist_keys;

int dist_chunks(int ranks, acr_placement placement);
acr_rows dist_chunk(int64_t len, int chunks, int index);
/* The number of a rank's chunk 0 or 1; -1 where it has no second. */
int dist_chunk_of(int ranks, int rank, acr_placement placement, int which);
/* Rows of a sequence that a rank holds. */
int64_t dist_rows_of(int64_t len, int ranks, int rank, acr_placement placement);

/* The pieces of a rank, at most dist_pieces_max of them; returns how many. With `split` no piece crosses the beginning
 * of a chunk of keys under a mask. */
int dist_pieces_max(const dist_sequences *s);
int dist_pieces(const dist_sequences *s, int rank, int split, dist_piece *out);

/* The keys of rank `source` that a piece (split) sees, counted in that rank's order. No windows. */
dist_keys dist_seen_of(const dist_sequences *s, const dist_piece *piece, int source);

/* The keys of the whole sequence that a piece sees. */
dist_keys dist_seen(const dist_sequences *s, const dist_piece *piece);

/* The keys of chunk `index` that rank `rank` needs, as positions: from the first that one of its pieces sees to the
 * last. */
acr_rows dist_needed(const dist_sequences *s, const dist_piece *pieces, int count, int index);

#endif
