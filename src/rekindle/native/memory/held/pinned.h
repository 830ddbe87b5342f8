// A source that stays in memory although sources may move to the host, for the report of a run.
#pragma once

#include "../../base/types.h"
#include "../../torch/storage_ptr.h"

namespace rekindle {

struct PinnedSource final {
    WeakTensor tensor;  // a tensor of the program with this memory
    Bytes nbytes;
    const char* site;  // name of the operator that made the memory
    const char* why;
};

}  // namespace rekindle
