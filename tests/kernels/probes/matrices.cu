// Which misuse of wgmma does the emulator find? d [64, 64] += a [64, k] b [64, k]^T by one warpgroup, from a ring of
// four stages of 64 k.
#include "hopper.h"

using namespace smelt;

namespace {

enum Bug : int {
  NONE,
  NO_ASYNC_FENCE,
  ASYNC_FENCE_LATE,
  NO_BARRIER,
  NO_FENCE,
  COPY_IN_FLIGHT,
  REFILL_EARLY,
  WRITES_IN_FLIGHT,
  NEVER_COMMITTED,
  NEVER_WAITED,
  STEP_TOO_LONG,
  OUTSIDE,
  DESCRIPTORS_DIFFER,
  WARP_MISSING,
  ANOTHER_SHAPE,
  NO_SECOND_FENCE,
  READS_IN_FLIGHT
};

constexpr int TILE = 64 * 128, STAGE = 2 * TILE, STAGES = 4;

SMELT_KERNEL(128, 1)
void matrices_kernel(const uint32_t* in, uint32_t* out, int steps, Bug bug) {
  SMELT_SHARED(shared);
  const int thread = threadIdx.x;
  const auto fill = [&](int step) {  // a and b, one after the other, rows of 128 bytes
    if (step >= steps) return;
    unsigned char* const stage = shared + step % STAGES * STAGE;
    for (int i = thread; i < STAGE / 16; i += 128)
      copy_async16(stage + (i / 8 * 8 + (i % 8 ^ i / 8 % 8)) * 16, in + (step * (STAGE / 16) + i) * 4, 16);
  };
  const auto multiply = [&](int step, float (&d)[32]) {
    unsigned char* const stage = shared + step % STAGES * STAGE;
    for (int k = 0; k < 4; ++k) {
      const int a = bug == STEP_TOO_LONG ? k * 64 : bug == DESCRIPTORS_DIFFER && thread == 31 ? 32 : k * 32;
      const int b = bug == OUTSIDE ? STAGES * STAGE - step % STAGES * STAGE - 1024 : TILE + k * 32;
      wgmma<64, false, false>(d, descriptor(stage + a, false), descriptor(stage + b, false));
    }
  };
  float d[48] = {};
  float (&sums)[32] = reinterpret_cast<float (&)[32]>(d);
  for (int step = 0; step < 2; ++step) {
    fill(step);
    commit_copies();
  }
  for (int step = 0; step < steps; ++step) {
    if (bug == COPY_IN_FLIGHT)
      wait_copies<2>();
    else
      wait_copies<1>();
    if (bug != NO_ASYNC_FENCE && bug != ASYNC_FENCE_LATE) fence_async();
    if (bug != NO_BARRIER) barrier();
    if (bug == ASYNC_FENCE_LATE) fence_async();
    if (bug == WARP_MISSING) wait_copies<0>();
    if (bug == WARP_MISSING && thread >= 96) return;
    if (bug != NO_FENCE) wgmma_fence();
    multiply(step, sums);
    if (bug == WRITES_IN_FLIGHT) sums[3] += 1;
    if (bug == ANOTHER_SHAPE) wgmma<96, false, false>(d, descriptor(shared, false), descriptor(shared, false));
    if (bug != NEVER_COMMITTED || step + 1 < steps) wgmma_commit();
    fill(step + (bug == REFILL_EARLY ? 3 : 2));  // into the stage that was read two steps ago, or only one
    commit_copies();
    wgmma_wait<1>();
    if (bug == NO_SECOND_FENCE) {
      wgmma_wait<0>();
      multiply(step, sums);
    }
  }
  if (bug != NEVER_WAITED && bug != READS_IN_FLIGHT) wgmma_wait<0>();
  for (int i = 0; i < 32; ++i) store4(out + thread * 32 + i, bits(sums[i]));
  if (bug == READS_IN_FLIGHT) wgmma_wait<0>();
}

}  // namespace

extern "C" int probe_matrices(const uint32_t* in, uint32_t* out, int steps, int bug) {
  return SMELT_LAUNCH(matrices_kernel, 1, 128, STAGES * STAGE, nullptr, in, out, steps, static_cast<Bug>(bug));
}
