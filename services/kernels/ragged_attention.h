// What the attention kernels share: where a request's keys lie, and the loop over blocks and KV heads. An including file
// defines `number` (what q, cache and out hold), PAGE and HEAD_DIM before, and the functions declared here behind.
#include <stdint.h>
#include <stdlib.h>

// The keys that a block's queries can see: cells [base, base + keys) of its request, in whole sixteens. `padded` is the
// row stride of scores and probabilities, in whole thirty-twos.
typedef struct {
    int64_t base, keys, padded;
    const int64_t *table;
} Span;

static inline Span span_of(int64_t start, int64_t end, int64_t window, const int64_t *table) {
    const int64_t base = window && start >= window ? (start - window + 1) & -16 : 0;
    return (Span){base, (end - base + 15) & -16, (end - base + 31) & -32, table};
}

// Row of key or value number k of the span. Unsigned, for then the divisions are shifts.
static inline const number *cell(const number *pages, const Span *span, int64_t k) {
    const uint64_t at = (uint64_t)(span->base + k);
    return pages + span->table[at / PAGE] * (PAGE * HEAD_DIM) + (at % PAGE) * HEAD_DIM;
}

// Where the block's output rows go; rows are the query heads of a token, then the next token's.
typedef struct {
    number *rows;
    int64_t stride;
    int fold;
} Output;

static inline number *output_row(const Output *out, int row) {
    return out->rows + (row / out->fold) * out->stride + (row % out->fold) * HEAD_DIM;
}

// A block's query rows: those of the `fold` query heads of each of its tokens, from position `start` on. They see keys
// below `end`; if `causal` only those up to themselves; if `window` only those less than that far away.
typedef struct {
    const number *q;
    int64_t stride;
    int fold, tokens;
    int64_t start, end;
    int causal;
    int64_t window;
} Queries;

// The keys of the span that query row i sees: [from, to), numbers within the span.
static inline void view_of(const Queries *block, const Span *span, int i, int64_t *from, int64_t *to) {
    const int64_t position = block->start + i / block->fold;
    *from = 0;
    *to = block->causal ? position + 1 : block->end;
    if (block->window) {
        *from = position >= block->window ? position - block->window + 1 : 0;
        *to = *to < position + block->window ? *to : position + block->window;
    }
    *from -= span->base;
    *to -= span->base;
}

// Floats that `attend` works in, for so many query rows.
static inline int64_t work_of(int rows, const Span *span);

// One block and KV head. `keys` and `values` are the head's pages; scores are multiplied by `scale` and are exponents of
// 2.
static void attend(const Queries *block, const number *keys, const number *values, const Span *span, Output out,
                   float *work, float scale);

static void begin_thread(void);
static void end_thread(void);

// q [n, q_stride], cache [2 * kv_heads * num_pages, PAGE * HEAD_DIM], out [n, out_stride]. Block b has `tokens[b]` query
// tokens, rows first[b] and on, at positions start[b] and on, of the request whose pages are table[owner[b]], and sees
// keys below end[b]. Returns 0, or 1 if memory ran out.
int ragged_attention(const number *q, int64_t q_stride, const number *cache, int64_t num_pages, int kv_heads, int fold,
                     int blocks, const int64_t *first, const int64_t *tokens, const int64_t *start, const int64_t *end,
                     const int64_t *owner, const int64_t *table, int64_t table_stride, int causal, int64_t window,
                     number *out, int64_t out_stride, float scale, int threads) {
    const int items = blocks * kv_heads;
    const int64_t head = num_pages * (PAGE * HEAD_DIM);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (items > 1)
    {
        float *work = NULL;
        int64_t size = 0;
        begin_thread();
#pragma omp for schedule(dynamic, 1)
        for (int item = 0; item < items; item++) {
            const int b = item / kv_heads, h = item % kv_heads;
            const Span span = span_of(start[b], end[b], window, table + owner[b] * table_stride);
            const int64_t need = work_of((int)tokens[b] * fold, &span);
            if (need > size) {
                free(work);
                work = aligned_alloc(64, (need * sizeof(float) + 63) & -64);
                size = work ? need : 0;
            }
            if (!work) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            const int64_t column = h * fold * HEAD_DIM;
            const Queries block = {q + first[b] * q_stride + column, q_stride, fold,   (int)tokens[b],
                                   start[b],                         end[b],   causal, window};
            const Output to = {out + first[b] * out_stride + column, out_stride, fold};
            attend(&block, cache + h * head, cache + (kv_heads + h) * head, &span, to, work, scale);
        }
        free(work);
        end_thread();
    }
    return failed;
}
