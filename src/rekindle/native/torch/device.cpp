#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "raised.h"
#include "versions.h"

namespace rekindle {

namespace {

// Parts of error messages of cuBLAS, CUDA, cuDNN and NCCL that mean out of memory.
constexpr std::array<std::string_view, 4> OUT_OF_MEMORY{
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "NCCL Error 1: unhandled cuda error: out of memory",
};

}  // namespace

bool is_device_oom(const std::exception& error) {
    if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr || is_out_of_memory(error)) {
        return true;
    }
    const std::string_view said = error.what();
    return std::ranges::any_of(OUT_OF_MEMORY, [&](std::string_view text) {
        return said.find(text) != std::string_view::npos;
    });
}

std::string message_of(const std::exception& error) {
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

bool Device::is_captured(const c10::Stream& stream) const {
    return writes_a_graph(*guard_, stream);
}

void Device::read(const c10::StorageImpl& storage_impl, Order& order, StreamIndex here) {
    if (order.again) {
        if (orders_readers) {
            streams.wait_for_maker(here, order);
        }
        keep_for(storage_impl, order, here);
    }
    order.readers.add(here);
}

void Device::about_to_read_again(
    const c10::StorageImpl& storage_impl, StorageId storage, StreamIndex here
) {
    recomputed_on_.add(here);
    Order& order = streams.order_of(storage);
    order.again_readers.add(here);
    if (!streams.are_several()) {
        return;
    }
    if (orders) {
        streams.wait_for_maker(here, order);
    }
    keep_for(storage_impl, order, here);
    order.readers.add(here);
}

void Device::about_to_write_again(StorageId storage, StreamIndex here) {
    if (orders && streams.are_several()) {
        streams.wait_for(here, streams.order_of(storage).readers);
    }
}

void Device::about_to_step() {
    if (queues() && streams.are_several() && orders_writers) {
        streams.wait_for(see(), std::exchange(recomputed_on_, {}));
    }
}

// Register with the allocator that the stream `here` uses the memory of `storage_impl`. If the
// memory is freed, the allocator does not reuse it until that stream's work so far is done.
void Device::keep_for(const c10::StorageImpl& storage_impl, Order& order, StreamIndex here) const {
    if (keeps && !order.kept_for.has(here) && storage_impl.device_type() == which_.type()) {
        guard_->recordDataPtrOnStream(storage_impl.data_ptr(), streams.seen()[here]);
        order.kept_for.add(here);
    }
}

void Device::keep_until_read(const c10::StorageImpl& storage_impl, const StreamSet& readers) const {
    if (!streams.are_several() || !keeps || storage_impl.device_type() != which_.type()) {
        return;
    }
    const auto& seen = streams.seen();
    for (StreamIndex i = 0; i < seen.size(); ++i) {
        if (readers.has(i)) {
            guard_->recordDataPtrOnStream(storage_impl.data_ptr(), seen[i]);
        }
    }
}

c10::CachingDeviceAllocator::DeviceStats Device::stats() const {
    return c10::getDeviceAllocator(which_.type())->getDeviceStats(which_.index());
}

AllocatorStats Device::given_out() const {
    const auto all = stats();
    // the first entry of the statistics is the total of all pools
    const auto& bytes = all.allocated_bytes[0];
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
