#pragma once
#include "shadow.h"
namespace smelt::emulator {
struct Warpgroup {};
inline void finish_matrix_pipes(Block&) {}
}
