/* The two inner loops that torch is slow at on a CPU, written once in C; `native.py` says why.

   conv_forward / conv_backward: depthwise causal convolution of 4 taps, silu, and for the first
   `normed` channels an l2 norm per head of `head` channels; the first `scaled` channels (the
   queries) are multiplied by `scale`. Rows are [batch, length, channels] in bf16, sums in fp32.

   unit_lower_inverse: (I + A)^-1 for strictly lower triangular A, [count, n, n] in fp32. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define CHANNELS_MAX 2048
#define EPS 1e-6f

static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* pre[c] = sum_j w[j][c] * x[t-3+j][c] */
static void taps(const uint16_t *x, const float *w, int t, int channels, float *pre) {
    const uint16_t *now = x + (int64_t)t * channels;
    for (int c = 0; c < channels; c++) pre[c] = w[3 * channels + c] * widen(now[c]);
    for (int back = 1; back <= 3 && back <= t; back++) {
        const uint16_t *row = now - (int64_t)back * channels;
        const float *weight = w + (3 - back) * channels;
        for (int c = 0; c < channels; c++) pre[c] += weight[c] * widen(row[c]);
    }
}

void conv_forward(const uint16_t *x, const float *w, uint16_t *y, int batch, int length, int channels,
                  int normed, int scaled, int head, float scale) {
    float pre[CHANNELS_MAX];
    for (int b = 0; b < batch; b++) {
        const uint16_t *xb = x + (int64_t)b * length * channels;
        uint16_t *yb = y + (int64_t)b * length * channels;
        for (int t = 0; t < length; t++) {
            taps(xb, w, t, channels, pre);
            for (int c = 0; c < channels; c++) pre[c] = pre[c] / (1.0f + expf(-pre[c]));
            for (int h = 0; h < normed; h += head) {
                float sum = 0.0f;
                for (int c = h; c < h + head; c++) sum += pre[c] * pre[c];
                float r = (h < scaled ? scale : 1.0f) / sqrtf(sum + EPS);
                for (int c = h; c < h + head; c++) pre[c] *= r;
            }
            uint16_t *out = yb + (int64_t)t * channels;
            for (int c = 0; c < channels; c++) out[c] = narrow(pre[c]);
        }
    }
}

void conv_backward(const uint16_t *x, const float *w, const uint16_t *dy, uint16_t *dx, float *dw, int batch,
                   int length, int channels, int normed, int scaled, int head, float scale) {
    float pre[CHANNELS_MAX], act[CHANNELS_MAX], ring[4][CHANNELS_MAX];
    memset(dw, 0, sizeof(float) * 4 * channels);
    for (int b = 0; b < batch; b++) {
        const uint16_t *xb = x + (int64_t)b * length * channels;
        const uint16_t *dyb = dy + (int64_t)b * length * channels;
        uint16_t *dxb = dx + (int64_t)b * length * channels;
        memset(ring, 0, sizeof(ring));
        for (int t = length - 1; t >= 0; t--) {
            float *grad = ring[t & 3];
            const uint16_t *dout = dyb + (int64_t)t * channels;
            taps(xb, w, t, channels, pre);
            for (int c = 0; c < channels; c++) {
                float sig = 1.0f / (1.0f + expf(-pre[c]));
                act[c] = pre[c] * sig;
                pre[c] = sig * (1.0f + pre[c] * (1.0f - sig));
                grad[c] = widen(dout[c]);
            }
            for (int h = 0; h < normed; h += head) {
                float sum = 0.0f, dot = 0.0f;
                for (int c = h; c < h + head; c++) sum += act[c] * act[c];
                for (int c = h; c < h + head; c++) dot += act[c] * grad[c];
                float r = 1.0f / sqrtf(sum + EPS), outer = h < scaled ? scale : 1.0f;
                for (int c = h; c < h + head; c++) grad[c] = outer * r * (grad[c] - act[c] * r * r * dot);
            }
            for (int c = 0; c < channels; c++) grad[c] *= pre[c];
            for (int back = 0; back <= 3 && back <= t; back++) {
                const uint16_t *row = xb + (int64_t)(t - back) * channels;
                float *to = dw + (3 - back) * channels;
                for (int c = 0; c < channels; c++) to[c] += grad[c] * widen(row[c]);
            }
            uint16_t *din = dxb + (int64_t)t * channels;
            const float *g0 = ring[t & 3], *g1 = ring[(t + 1) & 3], *g2 = ring[(t + 2) & 3], *g3 = ring[(t + 3) & 3];
            const float *w3 = w + 3 * channels, *w2 = w + 2 * channels, *w1 = w + channels;
            for (int c = 0; c < channels; c++)
                din[c] = narrow(w3[c] * g0[c] + w2[c] * g1[c] + w1[c] * g2[c] + w[c] * g3[c]);
        }
    }
}

void unit_lower_inverse(const float *a, float *out, int count, int n) {
    for (int m = 0; m < count; m++) {
        const float *am = a + (int64_t)m * n * n;
        float *om = out + (int64_t)m * n * n;
        memset(om, 0, sizeof(float) * n * n);
        for (int i = 0; i < n; i++) {
            float *row = om + (int64_t)i * n;
            for (int k = 0; k < i; k++) {
                float factor = am[(int64_t)i * n + k];
                const float *earlier = om + (int64_t)k * n;
                for (int j = 0; j <= k; j++) row[j] -= factor * earlier[j];
            }
            row[i] = 1.0f;
        }
    }
}
