// What happens to threads that do not come along?
#include "device.h"

using namespace smelt;

namespace {

enum Bug : int {
  NONE,
  EXIT_BEFORE_SHUFFLE,
  ANOTHER_SHUFFLE,
  ANOTHER_INSTRUCTION,
  SHUFFLE_TOO_FAR,
  EXIT_BEFORE_BARRIER,
  BARRIER_OF_HALF,
  TWO_BARRIERS
};

// 128 threads add up their numbers, a warp each.
SMELT_KERNEL(128, 1)
void warps_kernel(uint32_t* out, Bug bug) {
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  float sum = static_cast<float>(thread);
  if (bug == EXIT_BEFORE_SHUFFLE && thread == 77) return;
  if (bug == ANOTHER_SHUFFLE && lane == 9) sum = shuffle_xor(sum, 1);
  if (bug == ANOTHER_INSTRUCTION && lane < 16) {
    float c[4] = {};
    const uint32_t a[4] = {};
    mma(c, a, 0, 0);
  }
  for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, bug == SHUFFLE_TOO_FAR ? 32 : mask);
  if (bug == EXIT_BEFORE_BARRIER && thread == 3) return;
  if (bug == BARRIER_OF_HALF && thread >= 64) barrier();
  if (bug == TWO_BARRIERS && thread % 2 == 0) barrier();
  if (bug == TWO_BARRIERS && thread % 2 == 1) barrier();
  barrier();
  store4(out + thread, bits(sum));
}

}  // namespace

extern "C" int probe_warps(uint32_t* out, int bug) {
  return SMELT_LAUNCH(warps_kernel, 1, 128, 0, nullptr, out, static_cast<Bug>(bug));
}
