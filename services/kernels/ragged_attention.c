// Attention of ragged query blocks over paged bfloat16 K/V, for x86 with AVX512-BF16. See ragged_attention.py.
//
// One item is one block and one KV head: its queries (query tokens x query heads of the group) are the rows of two
// small matrix products with the keys and values of that head. Scores, softmax and sums are float32; probabilities are
// rounded to bfloat16 for the second product, as the reference does. Both products exist twice: in AMX tiles, which
// compute 16 rows at a time and are no slower for few, and in vectors for processors without.
//
// Compiled for one HEAD_DIM (a multiple of 32), PAGE (a multiple of 16) and AMX (1 where the process may use it).
#include <immintrin.h>
#include <stdint.h>

#include "exp2.h"

#define PAIRS (HEAD_DIM / 2)
#define CHUNKS (HEAD_DIM / 32)
#define ROWS 4  // rows that share one pass over K or V, in vectors

typedef uint16_t bf16;
typedef bf16 number;
#include "ragged_attention.h"

#if AMX && defined(__AMX_BF16__)
#define TILES 1
#else
#define TILES 0
#endif

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

static inline __m512 weight_512(__m512 x) { return exp2_512(_mm512_max_ps(x, _mm512_set1_ps(-126.0f))); }

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
        __m512 e = _mm512_maskz_mov_ps(lanes(k, from, to), weight_512(x));
        __m256bh narrow = _mm512_cvtneps_pbh(e);
        _mm256_storeu_si256((__m256i *)(probs + k), (__m256i)narrow);
        sum = _mm512_add_ps(sum, e);
    }
    for (int64_t k = last; k < padded; k += 16) _mm256_storeu_si256((__m256i *)(probs + k), _mm256_setzero_si256());
    return _mm512_reduce_add_ps(sum);
}

// Sixteen keys, pair-major: tile[p] is the p-th pair of numbers of each.
static inline void load_keys(const bf16 *keys, const Span *span, int64_t k, __m512i *tile) {
    const uint32_t *from = (const uint32_t *)cell(keys, span, k);
    for (int p = 0; p < PAIRS; p += 16) transpose16(from + p, PAIRS, tile + p);
}

// Undoes the order in which unpacklo and unpackhi leave 32 columns; divides by the sum; rounds.
static inline void store_columns(__m512 low, __m512 high, __m512 by, bf16 *to) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 x = _mm512_mul_ps(_mm512_permutex2var_ps(low, first, high), by);
    __m512 y = _mm512_mul_ps(_mm512_permutex2var_ps(low, second, high), by);
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
    _mm256_storeu_si256((__m256i *)(to + 16), (__m256i)_mm512_cvtneps_pbh(y));
}

#if TILES
// The compiler does not know that tile loads and stores touch memory.
#define SETTLE() __asm__ volatile("" ::: "memory")

// All eight tiles have 16 rows of 64 bytes.
static void configure_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.bytes[i] = 64;
        shape.rows[i] = 16;
    }
    SETTLE();
    _tile_loadconfig(&shape);
}

// scores [rows, padded] of every query and key of the span; queries and scores have rows up to the next sixteen.
static void score(const uint32_t *queries, int rows, const bf16 *keys, const Span *span, float *scores) {
    for (int64_t k = 0; k < span->keys; k += 16) {
        __m512i tile[PAIRS];
        load_keys(keys, span, k, tile);
        SETTLE();
        for (int i = 0; i < rows; i += 16) {
            _tile_zero(0);
            for (int p = 0; p < PAIRS; p += 16) {
                _tile_loadd(1, queries + i * PAIRS + p, PAIRS * 4);
                _tile_loadd(2, tile + p, 64);
                _tile_dpbf16ps(0, 1, 2);
            }
            _tile_stored(0, scores + i * span->padded + k, span->padded * 4);
        }
        SETTLE();
    }
}

// Columns c .. c + 31 of values k .. k + 31 in pairs of rows, zeros beyond the last: two tiles of 16 columns.
static inline void load_values(const bf16 *values, const Span *span, int64_t k, int c, __m512i pairs[2][16]) {
    for (int half = 0; half < 16; half += 8) {
        const int64_t at = k + 2 * half;
        const bf16 *v = at < span->keys ? cell(values, span, at) + c : NULL;
        for (int i = 0; i < 8; i++) {
            __m512i even = _mm512_setzero_si512(), odd = even;
            if (v) {
                even = _mm512_loadu_si512(v + 2 * i * HEAD_DIM);
                odd = _mm512_loadu_si512(v + (2 * i + 1) * HEAD_DIM);
            }
            pairs[0][half + i] = _mm512_unpacklo_epi16(even, odd);
            pairs[1][half + i] = _mm512_unpackhi_epi16(even, odd);
        }
    }
}

// Sums of the values by their probabilities, over the sum of those; probs has rows up to the next sixteen.
static void weigh(const bf16 *probs, const float *sums, int rows, const bf16 *values, const Span *span, Output out) {
    const int64_t stride = span->padded * 2;
    for (int i = 0; i < rows; i += 32)
        for (int c = 0; c < HEAD_DIM; c += 32) {
            const int two = i + 16 < rows;
            const bf16 *upper = probs + i * span->padded, *lower = upper + 16 * span->padded;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < span->padded; k += 32) {
                __m512i pairs[2][16];
                load_values(values, span, k, c, pairs);
                SETTLE();
                _tile_loadd(4, pairs[0], 64);
                _tile_loadd(5, pairs[1], 64);
                _tile_loadd(6, upper + k, stride);
                _tile_dpbf16ps(0, 6, 4);
                _tile_dpbf16ps(1, 6, 5);
                if (!two) continue;
                _tile_loadd(7, lower + k, stride);
                _tile_dpbf16ps(2, 7, 4);
                _tile_dpbf16ps(3, 7, 5);
            }
            float sum[2][32][16] __attribute__((aligned(64)));
            _tile_stored(0, sum[0], 64);
            _tile_stored(1, sum[1], 64);
            _tile_stored(2, sum[0] + 16, 64);
            _tile_stored(3, sum[1] + 16, 64);
            SETTLE();
            for (int r = 0; r < 32 && i + r < rows; r++)
                store_columns(_mm512_load_ps(sum[0][r]), _mm512_load_ps(sum[1][r]), _mm512_set1_ps(1.0f / sums[i + r]),
                              output_row(&out, i + r) + c);
        }
}
#else
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

static void score(const uint32_t *queries, int rows, const bf16 *keys, const Span *span, float *scores) {
    for (int64_t k = 0; k < span->keys; k += 16) {
        __m512i tile[PAIRS];
        load_keys(keys, span, k, tile);
        for (int i = 0; i < rows; i += ROWS)
            dot_tile(tile, queries + i * PAIRS, rows - i < ROWS ? rows - i : ROWS, scores + i * span->padded + k,
                     span->padded);
    }
}

static void weigh(const bf16 *probs, const float *sums, int rows, const bf16 *values, const Span *span, Output out) {
    for (int i = 0; i < rows; i += ROWS) {
        const int n = rows - i < ROWS ? rows - i : ROWS;
        __m512 low[ROWS][CHUNKS], high[ROWS][CHUNKS];
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < CHUNKS; c++) low[r][c] = high[r][c] = _mm512_setzero_ps();
        for (int64_t k = 0; k < span->keys; k += 2) {
            const bf16 *v = cell(values, span, k);
            __m512i a[CHUNKS], b[CHUNKS];
            for (int c = 0; c < CHUNKS; c++) {
                __m512i even = _mm512_loadu_si512(v + 32 * c), odd = _mm512_loadu_si512(v + HEAD_DIM + 32 * c);
                a[c] = _mm512_unpacklo_epi16(even, odd);
                b[c] = _mm512_unpackhi_epi16(even, odd);
            }
            for (int r = 0; r < ROWS; r++) {
                if (r >= n) continue;
                const uint32_t *pair = (const uint32_t *)(probs + (i + r) * span->padded + k);
                __m512bh p = (__m512bh)_mm512_set1_epi32(*pair);
                for (int c = 0; c < CHUNKS; c++) {
                    low[r][c] = _mm512_dpbf16_ps(low[r][c], p, (__m512bh)a[c]);
                    high[r][c] = _mm512_dpbf16_ps(high[r][c], p, (__m512bh)b[c]);
                }
            }
        }
        for (int r = 0; r < n; r++)
            for (int c = 0; c < CHUNKS; c++)
                store_columns(low[r][c], high[r][c], _mm512_set1_ps(1.0f / sums[i + r]),
                              output_row(&out, i + r) + 32 * c);
    }
}
#endif

// Rows are counted in whole sixteens, for tiles.
static inline int64_t work_of(int rows, const Span *span) {
    const int64_t tall = (rows + 15) & -16;
    return tall * (span->padded + PAIRS + span->padded / 2 + 1);
}

static void begin_thread(void) {
#if TILES
    configure_tiles();
#endif
}

static void end_thread(void) {
#if TILES
    _tile_release();
#endif
}

static void attend(const Queries *block, const bf16 *keys, const bf16 *values, const Span *span, Output out,
                   float *work, float scale) {
    const int fold = block->fold, rows = block->tokens * fold, tall = (rows + 15) & -16;
    float *scores = work;
    uint32_t *queries = (uint32_t *)(scores + tall * span->padded);
    bf16 *probs = (bf16 *)(queries + tall * PAIRS);
    float *sums = (float *)(probs + tall * span->padded);
    for (int i = 0; i < rows; i++) {
        const uint32_t *row = (const uint32_t *)(block->q + (i / fold) * block->stride + (i % fold) * HEAD_DIM);
        for (int p = 0; p < PAIRS; p++) queries[i * PAIRS + p] = row[p];
    }
    score(queries, rows, keys, span, scores);
    for (int i = 0; i < rows; i++) {
        const int64_t at = i * span->padded;
        int64_t from, to;
        view_of(block, span, i, &from, &to);
        sums[i] = softmax_row(scores + at, probs + at, from, to, span->padded, scale);
    }
    weigh(probs, sums, rows, values, span, out);
}
