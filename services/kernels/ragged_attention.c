// Attention of ragged query blocks over paged bfloat16 K/V, for x86 with AVX512-BF16. See ragged_attention.py.
//
// One item is one block and one KV head: its queries (query tokens x query heads of the group) are the rows of two
// small matrix products with the keys and values of that head. Scores, softmax and sums are float32; probabilities are
// rounded to bfloat16 for the second product, as the reference does.
//
// Compiled for one HEAD_DIM (a multiple of 32) and PAGE (a multiple of 16).
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#define PAIRS (HEAD_DIM / 2)
#define CHUNKS (HEAD_DIM / 32)
#define ROWS 4  // rows that share one pass over K or V

typedef uint16_t bf16;

// b[c] = column c of the 16 x 16 matrix of 32-bit words whose rows are src[0], src[stride], ...
static inline void transpose16(const uint32_t *src, int64_t stride, __m512i *out) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(src + i * stride);
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int half = 0; half < 16; half += 8)
        for (int i = 0; i < 4; i++) {
            t[half + i] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0x88);
            t[half + i + 4] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        out[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        out[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// 2^x for x <= 0, relative error below 2e-7: split off the integer, Taylor polynomial of the rest.
static inline __m512 exp2_512(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);  // in [-0.5, 0.5]
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

// scores[i][0..16) of `rows` queries against 16 keys given as pair-major tile [PAIRS] of 16 words.
static inline void dot_tile(const __m512i *tile, const uint32_t *q, int rows, float *scores, int64_t stride) {
    __m512 even[ROWS], odd[ROWS];
    for (int i = 0; i < ROWS; i++) even[i] = odd[i] = _mm512_setzero_ps();
    for (int p = 0; p < PAIRS; p += 2)
        for (int i = 0; i < ROWS; i++) {
            if (i >= rows) continue;
            even[i] = _mm512_dpbf16_ps(even[i], (__m512bh)tile[p], (__m512bh)_mm512_set1_epi32(q[i * PAIRS + p]));
            odd[i] = _mm512_dpbf16_ps(odd[i], (__m512bh)tile[p + 1], (__m512bh)_mm512_set1_epi32(q[i * PAIRS + p + 1]));
        }
    for (int i = 0; i < rows; i++) _mm512_storeu_ps(scores + i * stride, _mm512_add_ps(even[i], odd[i]));
}

// Lanes of keys k .. k + 15 that lie in [from, to).
static inline __mmask16 lanes(int64_t k, int64_t from, int64_t to) {
    if (k >= from && to - k >= 16) return 0xffff;
    const __mmask16 before = to - k >= 16 ? 0xffff : to > k ? (__mmask16)((1u << (to - k)) - 1) : 0;
    return from <= k ? before : from - k >= 16 ? 0 : before & (__mmask16)(0xffffu << (from - k));
}

// Row softmax over scores[from..to), zeros elsewhere up to `padded`; writes bfloat16 probabilities times their sum.
static inline float softmax_row(float *scores, bf16 *probs, int64_t from, int64_t to, int64_t padded, float scale) {
    const int64_t first = from & -16, last = (to + 15) & -16;
    __m512 top = _mm512_set1_ps(-3.0e38f);
    for (int64_t k = first; k < last; k += 16)
        top = _mm512_mask_max_ps(top, lanes(k, from, to), top, _mm512_loadu_ps(scores + k));
    __m512 max = _mm512_set1_ps(_mm512_reduce_max_ps(top)), by = _mm512_set1_ps(scale), sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < first; k += 16) _mm256_storeu_si256((__m256i *)(probs + k), _mm256_setzero_si256());
    for (int64_t k = first; k < last; k += 16) {
        __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + k), max), by);
        __m512 e = _mm512_maskz_mov_ps(lanes(k, from, to), exp2_512(x));
        __m256bh narrow = _mm512_cvtneps_pbh(e);
        _mm256_storeu_si256((__m256i *)(probs + k), (__m256i)narrow);
        sum = _mm512_add_ps(sum, e);
    }
    for (int64_t k = last; k < padded; k += 16) _mm256_storeu_si256((__m256i *)(probs + k), _mm256_setzero_si256());
    return _mm512_reduce_add_ps(sum);
}

// The keys that a block's queries can see, [base, base + padded): whole sixteens.
typedef struct {
    int64_t base, padded;
} Span;

static inline Span span_of(int64_t start, int64_t end, int64_t window) {
    const int64_t base = window && start >= window ? (start - window + 1) & -16 : 0;
    return (Span){base, (end - base + 15) & -16};
}

// One block and KV head. `keys` and `values` are the head's pages; `table` the request's.
static void attend(const bf16 *q, int64_t q_stride, int fold, int tokens, int64_t start, int64_t end, int causal,
                   int64_t window, const bf16 *keys, const bf16 *values, const int64_t *table, bf16 *out,
                   int64_t out_stride, float *work, float scale) {
    const Span span = span_of(start, end, window);
    const int64_t base = span.base, padded = span.padded;
    const int rows = tokens * fold;
    float *scores = work, *sums = scores + (int64_t)rows * padded;
    uint32_t *queries = (uint32_t *)(sums + rows);
    bf16 *probs = (bf16 *)(queries + (int64_t)rows * PAIRS);
    for (int i = 0; i < rows; i++) {
        const uint32_t *row = (const uint32_t *)(q + (i / fold) * q_stride + (i % fold) * HEAD_DIM);
        for (int p = 0; p < PAIRS; p++) queries[i * PAIRS + p] = row[p];
    }
    for (int64_t k = 0; k < padded; k += 16) {
        const uint64_t at = (uint64_t)(base + k);  // unsigned: divided by shifts
        const bf16 *page = keys + table[at / PAGE] * (PAGE * HEAD_DIM) + (at % PAGE) * HEAD_DIM;
        __m512i tile[PAIRS];
        for (int p = 0; p < PAIRS; p += 16) transpose16((const uint32_t *)page + p, PAIRS, tile + p);
        for (int i = 0; i < rows; i += ROWS)
            dot_tile(tile, queries + i * PAIRS, rows - i < ROWS ? rows - i : ROWS, scores + i * padded + k, padded);
    }
    for (int i = 0; i < rows; i++) {
        const int64_t position = start + i / fold;
        int64_t from = 0, to = causal ? position + 1 : end;
        if (window) {
            from = position >= window ? position - window + 1 : 0;
            to = to < position + window ? to : position + window;
        }
        sums[i] = softmax_row(scores + i * padded, probs + i * padded, from - base, to - base, padded, scale);
    }
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < rows; i += ROWS) {
        const int n = rows - i < ROWS ? rows - i : ROWS;
        __m512 low[ROWS][CHUNKS], high[ROWS][CHUNKS];
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < CHUNKS; c++) low[r][c] = high[r][c] = _mm512_setzero_ps();
        for (int64_t k = 0; k < padded; k += 2) {
            const uint64_t at = (uint64_t)(base + k);  // unsigned: divided by shifts
            const bf16 *v = values + table[at / PAGE] * (PAGE * HEAD_DIM) + (at % PAGE) * HEAD_DIM;
            __m512i a[CHUNKS], b[CHUNKS];
            for (int c = 0; c < CHUNKS; c++) {
                __m512i even = _mm512_loadu_si512(v + 32 * c), odd = _mm512_loadu_si512(v + HEAD_DIM + 32 * c);
                a[c] = _mm512_unpacklo_epi16(even, odd);
                b[c] = _mm512_unpackhi_epi16(even, odd);
            }
            for (int r = 0; r < ROWS; r++) {
                if (r >= n) continue;
                __m512bh p = (__m512bh)_mm512_set1_epi32(*(const uint32_t *)(probs + (i + r) * padded + k));
                for (int c = 0; c < CHUNKS; c++) {
                    low[r][c] = _mm512_dpbf16_ps(low[r][c], p, (__m512bh)a[c]);
                    high[r][c] = _mm512_dpbf16_ps(high[r][c], p, (__m512bh)b[c]);
                }
            }
        }
        for (int r = 0; r < n; r++) {
            bf16 *to = out + ((i + r) / fold) * out_stride + ((i + r) % fold) * HEAD_DIM;
            const __m512 by = _mm512_set1_ps(1.0f / sums[i + r]);
            for (int c = 0; c < CHUNKS; c++) {
                __m512 x = _mm512_mul_ps(_mm512_permutex2var_ps(low[r][c], first, high[r][c]), by);
                __m512 y = _mm512_mul_ps(_mm512_permutex2var_ps(low[r][c], second, high[r][c]), by);
                _mm256_storeu_si256((__m256i *)(to + 32 * c), (__m256i)_mm512_cvtneps_pbh(x));
                _mm256_storeu_si256((__m256i *)(to + 32 * c + 16), (__m256i)_mm512_cvtneps_pbh(y));
            }
        }
    }
}

// q [n, q_stride], cache [2 * kv_heads * num_pages, PAGE * HEAD_DIM], out [n, out_stride]. Block b has `tokens[b]` query
// tokens, rows first[b] and on, at positions start[b] and on, of the request whose pages are table[owner[b]]. Its queries
// see keys below end[b]; if `causal` only those up to themselves; if `window` only those less than that far away.
// Returns 0, or 1 if memory ran out.
int ragged_attention(const bf16 *q, int64_t q_stride, const bf16 *cache, int64_t num_pages, int kv_heads, int fold,
                     int blocks, const int64_t *first, const int64_t *tokens, const int64_t *start, const int64_t *end,
                     const int64_t *owner, const int64_t *table, int64_t table_stride, int causal, int64_t window,
                     bf16 *out, int64_t out_stride, float scale, int threads) {
    const int items = blocks * kv_heads;
    const int64_t head = num_pages * (PAGE * HEAD_DIM);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (items > 1)
    {
        float *work = NULL;
        int64_t size = 0;
#pragma omp for schedule(dynamic, 1)
        for (int item = 0; item < items; item++) {
            const int b = item / kv_heads, h = item % kv_heads;
            const int64_t padded = span_of(start[b], end[b], window).padded, rows = tokens[b] * fold;
            const int64_t need = rows * (padded + 1 + PAIRS) + rows * padded / 2 + 16;
            if (need > size) {
                free(work);
                work = malloc(need * sizeof(float));
                size = work ? need : 0;
            }
            if (!work) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            attend(q + first[b] * q_stride + h * fold * HEAD_DIM, q_stride, fold, (int)tokens[b], start[b], end[b],
                   causal, window, cache + h * head, cache + (kv_heads + h) * head, table + owner[b] * table_stride,
                   out + first[b] * out_stride + h * fold * HEAD_DIM, out_stride, work, scale);
        }
        free(work);
    }
    return failed;
}
