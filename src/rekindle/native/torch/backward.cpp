#include "backward.h"

#include <torch/csrc/autograd/graph_task.h>

#include <atomic>

namespace rekindle {

namespace {

std::atomic<int> passes = 0;

}  // namespace

bool in_backward_pass() {
    return torch::autograd::get_current_graph_task_id() >= 0;
}

bool is_any_backward_pass() noexcept {
    return passes.load(std::memory_order_relaxed) != 0;
}

BackwardPass::BackwardPass() noexcept {
    passes.fetch_add(1, std::memory_order_relaxed);
}

BackwardPass::~BackwardPass() {
    passes.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace rekindle
