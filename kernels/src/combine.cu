// What does each token get from its K slots?
//
//     y_NH[n] = sum over k of weight_NK[n, k] out_SH[slot_NK[n, k]]
//
// Added up in float32 in order of k, so the result has the same bits every time. A choice that is not routed has slot
// -1 and adds nothing. A warp takes a token, a lane 8 columns at a time. Also here: the routing weight's gradient, a
// sum over the parts that smelt_dact left for the slot.
#include "device.h"
#include "grid.h"

namespace smelt {

constexpr int THREADS = 128, WARPS = THREADS / 32;

struct CombineArguments {
  const bf16* out;
  const int* slot;
  const float* weight;
  bf16* y;
  int64_t N;
  int K, H;
};

SMELT_KERNEL(THREADS, 8)
void combine_kernel(CombineArguments a) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (token >= a.N) return;
  for (int64_t column = threadIdx.x % 32 * 8; column < a.H; column += 32 * 8) {
    float sum[8] = {};
    for (int64_t choice = token * a.K; choice < (token + 1) * a.K; ++choice) {
      const int slot = a.slot[choice];
      if (slot < 0) continue;
      const float weight = a.weight ? a.weight[choice] : 1;
      const uint4 eight = load16(a.out + static_cast<int64_t>(slot) * a.H + column);
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
      SMELT_UNROLL
      for (int p = 0; p < 4; ++p) {
        sum[2 * p] += weight * low(pairs[p]);
        sum[2 * p + 1] += weight * high(pairs[p]);
      }
    }
    store16(a.y + token * a.H + column,
            uint4{pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7])});
  }
}

struct DweightArguments {
  const float* partial;
  int parts;
  const int* slot;
  float* dweight;
  int64_t S;
};

SMELT_KERNEL(THREADS, 8)
void dweight_kernel(DweightArguments a) {
  const int64_t choice = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (choice >= a.S) return;
  const int slot = a.slot[choice];
  float sum = 0;
  for (int64_t part = 0; slot >= 0 && part < a.parts; ++part) sum += a.partial[part * a.S + slot];
  store4(a.dweight + choice, bits(sum));
}

}  // namespace smelt

using namespace smelt;

int smelt_combine(const void* out, const int32_t* slot, const float* weight, void* y, int64_t N, int K, int H,
                  void* stream) {
  const bool aligned = (reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(y)) % 16 == 0;
  if (N < 0 || N > INT32_MAX || K < 0 || H < 8 || H % 8 || !aligned) return SMELT_BAD_ARGUMENT;
  if (N == 0) return 0;
  const CombineArguments a{static_cast<const bf16*>(out), slot, weight, static_cast<bf16*>(y), N, K, H};
  return SMELT_LAUNCH(combine_kernel, dim3(tiles(N, WARPS)), THREADS, 0, stream, a);
}

int smelt_dweight(const float* partial, int parts, const int32_t* slot, float* dweight, int64_t S, void* stream) {
  if (parts < 1 || S < 0 || S > INT32_MAX) return SMELT_BAD_ARGUMENT;
  if (S == 0) return 0;
  const DweightArguments a{partial, parts, slot, dweight, S};
  return SMELT_LAUNCH(dweight_kernel, dim3(tiles(S, THREADS)), THREADS, 0, stream, a);
}
