// Which instructions has Hopper besides device.h's? The warpgroup's matrix product and what orders it:
//
//   fill a stage (cp.async), wait_copies          every thread
//   fence_async                                   the writer: what it wrote becomes visible to wgmma ...
//   barrier                                       ... and to the other threads' wgmma
//   wgmma_fence                                   before the first wgmma, and again after registers of it were touched
//   wgmma ... wgmma, wgmma_commit                 the accumulators belong to the hardware from here
//   wgmma_wait<N>                                 all but the N youngest groups are done: registers and stage are free
//   again
//
// Operands stand in shared memory in the 128-byte swizzle: 16-byte chunk c of 128-byte row r is kept at chunk c ^ (r %
// 8), rows of 8 make an atom of 1024 bytes. K-major: a row is one m (or n) and 64 k. MN-major: a row is one k and 64 m
// (or n). A kernel that uses these puts its body under `#if SMELT_HOPPER`: other architectures have none of it.
#pragma once

#include "device.h"

#if defined(SMELT_EMULATED) || !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SMELT_HOPPER 1
#else
#define SMELT_HOPPER 0
#endif

#if SMELT_HOPPER
#if !defined(SMELT_EMULATED)
#include "hopper_instructions.h"
#endif

namespace smelt {

// What wgmma is told of an operand (PTX ISA, "matrix descriptor"). `start` is where its first m (or n) and first k
// stand: a multiple of 1024 bytes, plus 32 bytes for every 16 k in K-major. `stride_bytes` lie between two atoms in the
// direction of the rows (8 m or n in K-major, 8 k in MN-major); `leading_bytes`, which only MN-major has, between two
// groups of 64 m (or n).
SMELT_DEVICE uint64_t descriptor(const void* start, bool mn_major, int leading_bytes = 1024, int stride_bytes = 1024) {
  constexpr uint64_t swizzle_128 = 1;
  uint64_t leading = mn_major ? static_cast<uint64_t>(leading_bytes) >> 4 : 1;  // K-major: not used, 1 by convention
  return static_cast<uint64_t>((shared_address(start) & 0x3ffff) >> 4) | leading << 16 |
         static_cast<uint64_t>(stride_bytes) >> 4 << 32 | swizzle_128 << 62;
}

}  // namespace smelt
#endif
