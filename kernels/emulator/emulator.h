// Can a kernel be believed that no GPU has run? Every CUDA thread of the same source runs here as a fiber on the CPU,
// in an order drawn from a seed, and whatever a GPU would be free to do differently is either done in the worst way or
// is a finding.
//
//   stack.h      switching stacks               memory.h     cp.async, shared words, stores to global memory
//   block.h      which thread runs next         warp.h       ldmatrix, mma.sync, shuffles, roundings
//   shadow.h     races in shared memory         warpgroup.h  wgmma
//   launch.h     limits, order of blocks, findings
//
// A finding ends the launch with a code from 20000 on; smelt::message tells kernel, block, thread, line and what
// happened.
//
// Not modelled:
//   * speed, registers, occupancy, __launch_bounds__, caches, streams (a launch is over when it returns)
//   * the order and width in which the hardware sums the products of one mma or wgmma; expf stands for ex2.approx
//   * plain pointers into shared memory, plain loads and stores of global memory: device.h's functions are watched
//   * a block that reads what another block of the launch writes
//   * hand-offs in a warp ordered by __syncwarp or a shuffle (a finding here), and all synchronisation but the barrier
//     of a block: named barriers, mbarrier, TMA, clusters, atomics
//   * fence.proxy.async by the reader instead of the writer (legal on a GPU, a finding here)
//   * registers of a wgmma that are first written between its wgmma.fence and itself
//   * bank conflicts of anything but ldmatrix
#pragma once

#include "launch.h"
#include "memory.h"
#include "warp.h"
#include "warpgroup.h"

#define SMELT_KERNEL(threads, blocks_per_sm)
#define SMELT_DEVICE inline
#define SMELT_UNROLL
#define SMELT_SHARED(name) unsigned char* const name = smelt::emulator::current->shared
#define SMELT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  smelt::launch(#kernel, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

#define threadIdx (smelt::emulator::current->running->index)
#define blockIdx (smelt::emulator::current->index)
#define blockDim (smelt::emulator::current->block_size)
#define gridDim (smelt::emulator::current->grid_size)
