// What does SwiGLU make of a gate and an up, and what is its derivative?
//
//     h = gate sigmoid(gate) up                                        (arXiv:2002.05202 eq. 6)
//     dh/dgate = up (sigma + gate sigma (1 - sigma))    dh/dup = gate sigma       with sigma = sigmoid(gate)
#pragma once
#include "device.h"

namespace smelt {

SMELT_DEVICE float sigmoid(float x) { return 1 / (1 + exponential(-x)); }

SMELT_DEVICE float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }

struct SwigluSlope {
  float h, gate, up;  // the value, and its derivatives by gate and by up
};

SMELT_DEVICE SwigluSlope swiglu_slope(float gate, float up) {
  const float sigma = sigmoid(gate), silu = gate * sigma;
  return {silu * up, up * (sigma + silu * (1 - sigma)), silu};
}

}  // namespace smelt
