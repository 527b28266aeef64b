// Which misuse of cp.async does the emulator find? A ring of two stages: each of 64 threads copies a chunk of 16 bytes
// and reads that of its neighbour.
#include "device.h"

using namespace smelt;

namespace {

enum Bug : int {
  NONE,
  SHARED_MISALIGNED,
  GLOBAL_MISALIGNED,
  TWO_COPIES,
  OUTSIDE,
  TOO_LONG,
  NEVER_WAITED,
  WAITS_TOO_LITTLE,
  NO_BARRIER_AFTER,
  NO_BARRIER_BEFORE
};

SMELT_KERNEL(64, 1)
void copies_kernel(const uint32_t* in, uint32_t* out, int steps, Bug bug) {
  SMELT_SHARED(shared);
  const int mine = threadIdx.x, next = (threadIdx.x + 1) % 64;
  const auto fill = [&](int step) {
    const int chunk = step % 2 * 64 + mine;
    const int offset = bug == SHARED_MISALIGNED ? 4 : bug == OUTSIDE ? 1024 : 0;
    copy_async16(shared + chunk * 16 + offset, in + (step * 64 + mine) * 4 + (bug == GLOBAL_MISALIGNED), 16);
    if (bug == TWO_COPIES) copy_async16(shared + (step % 2 * 64 + next) * 16, in, 16);
    if (bug == TOO_LONG) copy_async16(shared + chunk * 16, in, 17);
  };
  fill(0);
  commit_copies();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps || bug == NEVER_WAITED) fill(step + 1);
    commit_copies();
    if (bug == WAITS_TOO_LITTLE)
      wait_copies<2>();
    else
      wait_copies<1>();
    if (bug != NO_BARRIER_AFTER) barrier();
    const int* const word = reinterpret_cast<const int*>(shared + (step % 2 * 64 + next) * 16);
    store4(out + step * 64 + mine, load_shared(word));
    if (bug != NO_BARRIER_BEFORE) barrier();
  }
}

}  // namespace

extern "C" int probe_copies(const uint32_t* in, uint32_t* out, int steps, int bug) {
  return SMELT_LAUNCH(copies_kernel, 1, 64, 2048, nullptr, in, out, steps, static_cast<Bug>(bug));
}
