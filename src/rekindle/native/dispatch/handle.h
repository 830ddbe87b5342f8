// What autograd holds in the place of a tensor, and what is done when it saves and asks (R1, R7).
#pragma once

#include <c10/core/impl/SizesAndStrides.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <optional>
#include <utility>

#include "../memory/driver.h"

namespace rekindle {

// One reference of autograd to a value: how to find it, and what it must look like. Its death is
// queued, not acted on: it may come in any thread, amid anything.
class Handle final : public torch::autograd::SavedVariableHooks {
public:
    explicit Handle(c10::intrusive_ptr<Driver> driver) : driver_(std::move(driver)) {}

    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    Handle(Handle&&) = delete;
    Handle& operator=(Handle&&) = delete;
    ~Handle() override;

    void call_pack_hook(const at::Tensor& tensor) override;
    at::Tensor call_unpack_hook() override;
    // Compiled autograd unpacks when it needs the value, by a function of Python's.
    std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>>
    retrieve_unpack_hook_data() const override;

private:
    std::unique_ptr<Handle> another() const;
    bool pack(const c10::TensorImpl& tensor, bool by_its_own_node);
    void keep_as_it_is(const at::Tensor& tensor);
    void check_version(const char* maker) const;
    at::Tensor moved(const Record& record) const;
    at::Tensor own_tensor() const;
    std::int64_t bytes_reached() const;
    at::Tensor in(const Home& home) const;

    c10::intrusive_ptr<Driver> driver_;
    Record* record_ = nullptr;  // counted; null: `kept_` is it
    c10::impl::SizesAndStrides geometry_;
    std::int64_t offset_ = 0;
    caffe2::TypeMeta dtype_;
    c10::DispatchKeySet keys_;
    Version version_;
    WeakTensor saved_ = no_tensor();  // the program's own tensor, if that is what is saved
    at::Tensor kept_;  // what cannot be rebuilt stays as it is, or what has attributes
};

}  // namespace rekindle
