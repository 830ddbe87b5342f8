#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "python.h"
#include "versions.h"

namespace rekindle {

namespace {

// What a library says in the place of an `OutOfMemoryError`: cuBLAS, the driver, NCCL.
constexpr std::array<std::string_view, 4> OUT_OF_MEMORY{
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "NCCL Error 1: unhandled cuda error: out of memory",
};

void wait(const c10::Stream& waiting, const c10::Stream& first) {
    c10::Event done(first.device_type());
    done.record(first);
    done.block(waiting);
}

}  // namespace

bool is_full(const std::exception& error) {
    if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr || is_out_of_memory(error)) {
        return true;
    }
    const std::string_view said = error.what();
    return std::ranges::any_of(OUT_OF_MEMORY, [&](std::string_view text) {
        return said.find(text) != std::string_view::npos;
    });
}

std::string said_by(const std::exception& error) {
    const auto* torchs = dynamic_cast<const c10::Error*>(&error);
    return torchs != nullptr ? torchs->what_without_backtrace() : error.what();
}

Bytes asked_for(std::string_view said) {
    constexpr std::string_view before = "Tried to allocate ";
    constexpr std::array<std::pair<std::string_view, double>, 4> units{
        {{" bytes", 1.0}, {" KiB", 0x1p10}, {" MiB", 0x1p20}, {" GiB", 0x1p30}}
    };
    const std::size_t found = said.find(before);
    if (found == std::string_view::npos) {
        return 0;
    }
    const std::string text(said.substr(found + before.size(), 40));
    char* end = nullptr;
    const double amount = std::strtod(text.c_str(), &end);
    const std::string_view rest(end);
    for (const auto& [name, unit] : units) {
        if (rest.starts_with(name)) {
            const double more = unit == 1.0 ? 0.0 : 0.005;
            return static_cast<Bytes>(std::ceil((amount + more) * unit));
        }
    }
    return 0;
}

Device::Device(c10::Device which) : which_(which) {
    if (which.type() == ACCELERATOR) {
        guard_ = c10::impl::getDeviceGuardImpl(which.type());
    }
}

bool Device::is_capturing() const {
    if (guard_ == nullptr) {
        return false;
    }
    const c10::Stream now = current_stream();
    return now.id() != 0 && writes_a_graph(*guard_, now);  // the default stream never does
}

void Device::see(const c10::Stream& stream) {
    if (std::ranges::find(seen_, stream) == seen_.end()) {
        seen_.push_back(stream);
    }
}

void Device::wait_for_others() const {
    const c10::Stream here = current_stream();
    for (const c10::Stream& each : seen_) {
        if (each != here) {
            wait(here, each);
        }
    }
}

void Device::let_others_wait() const {
    const c10::Stream here = current_stream();
    for (const c10::Stream& each : seen_) {
        if (each != here) {
            wait(each, here);
        }
    }
}

void Device::keep_until_read(const c10::StorageImpl& home) const {
    if (seen_.size() < 2 || !keeps || home.device_type() != which_.type()) {
        return;
    }
    for (const c10::Stream& each : seen_) {
        guard_->recordDataPtrOnStream(home.data_ptr(), each);
    }
}

c10::CachingDeviceAllocator::DeviceStats Device::stats() const {
    return c10::getDeviceAllocator(which_.type())->getDeviceStats(which_.index());
}

GivenOut Device::given_out() const {
    const auto all = stats();
    const auto& bytes = all.allocated_bytes[0];  // of all pools
    return {bytes.current, bytes.peak, bytes.freed};
}

Bytes Device::reserved() const {
    return stats().reserved_bytes[0].current;
}

Bytes Device::most_reserved() const {
    return stats().reserved_bytes[0].peak;
}

void Device::empty_cache() const {
    c10::getDeviceAllocator(which_.type())->emptyCache();
}

}  // namespace rekindle
