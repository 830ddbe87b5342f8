// What the core asks of Python: errors in words, and who a tensor is. Takes the GIL itself; never
// with the core's lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "driver.h"
#include "own_policy.h"
#include "swapper.h"

// As Python.h has it.
struct _object;

namespace rekindle {

// Who answers: an object of Python's whose methods make errors of numbers, and the types of plain
// tensors. Once.
void meet_python(_object* answers, _object* tensor, _object* parameter);
// Whether Python sees nothing but a `Tensor` or a `Parameter` in it.
bool is_plain_object(const c10::TensorImpl& tensor) noexcept;
// Whether Python sees a `Parameter` in it, or something derived from that.
bool is_parameter_object(const c10::TensorImpl& tensor) noexcept;
// Python's object for it; null: there is none.
const void* object_of(const c10::TensorImpl& tensor) noexcept;
// Whether it is Python's own word for that.
bool is_out_of_memory(const std::exception& error);
// `tensor.detach()` as Python does it: a subclass stays one.
at::Tensor detached(const at::Tensor& tensor);
// Who has memory now, at a new peak: Python writes it down.
void tell_peak(Driver& driver);
// How much there was, now and then: Python takes it.
void tell_samples(Driver& driver);
// Weights were met: the rest of their model counts as well, and the state of their optimizer.
void tell_owners(Driver& driver);
// Operators ran within the budget since this was told last: where the program is now.
void tell_places(Driver& driver);
// A copy on the host failed: Python warns of it.
void tell_complaint(Driver& driver);
// A range of the profiler begins or ends amid an optimizer's step.
void tell_range(const Driver& driver, bool ends);

// An error of the program's own policy is raised, once.
inline void raise_policy_error(const Driver& driver) {
    if (driver.own_policy != nullptr) {
        driver.own_policy->raise_error();
    }
}

// Tells all that is due.
inline void tell(Driver& driver) {
    if (driver.look_due && !looks_later()) {
        tell_peak(driver);
    }
    if (driver.samples_due) {
        tell_samples(driver);
    }
    if (driver.owners_due) {
        tell_owners(driver);
    }
    if (driver.places_due) {
        tell_places(driver);
    }
    if (driver.swapper != nullptr && driver.swapper->complaint_due) {
        tell_complaint(driver);
    }
    raise_policy_error(driver);
}

// A step begins with `met`: Python may know what comes then, of other processes.
void ask_for_lessons(const Driver& driver, std::int64_t met);

// What is read just now beside the arguments of an operator: it must stay where it is.
struct Read final {
    std::vector<at::Tensor> tensors;
    Homes homes;         // of those, and of others that are to be added
    bool saved = false;  // and all that autograd has as well
};

// Null: nobody knows, for there are other threads.
std::optional<Read> what_is_read(const Driver& driver);

// A driver is gone, and so are all handles of it: Python will hear of it.
void tell_gone(std::ptrdiff_t number) noexcept;
// Whether the program's own tensor has to come back, for there is more to it than its values: that
// of a leaf that needs no gradient. (Of others autograd knows the leaf.)
bool has_attributes(const c10::TensorImpl& tensor);

[[noreturn]] void raise(const Driver& driver, const Shortage& shortage);
[[noreturn]] void raise(Driver& driver, const ChangedSize& change);
[[noreturn]] void raise(Driver& driver, const ResizedInput& change);
[[noreturn]] void raise(Driver& driver, const ModifiedInput& change);
[[noreturn]] void raise(Driver& driver, const ForeignInput& change);
[[noreturn]] void raise(Driver& driver, const Unseen& unseen);
[[noreturn]] void raise(const Driver& driver, const Full& device);
[[noreturn]] void raise(const Driver& driver, const Elsewhere& device);
[[noreturn]] void raise(Driver& driver, const InAGraph& value);
[[noreturn]] void raise(const Driver& driver, const CopyLost& value);

// Runs `f`; what it throws in numbers is raised in words. It gives the lock back itself.
template <class F>
auto in_words(Driver& driver, F&& f) {
    try {
        return std::forward<F>(f)();
    } catch (const Shortage& error) {
        raise(driver, error);
    } catch (const ChangedSize& error) {
        raise(driver, error);
    } catch (const ResizedInput& error) {
        raise(driver, error);
    } catch (const ModifiedInput& error) {
        raise(driver, error);
    } catch (const ForeignInput& error) {
        raise(driver, error);
    } catch (const Unseen& error) {
        raise(driver, error);
    } catch (const Full& error) {
        raise(driver, error);
    } catch (const Elsewhere& error) {
        raise(driver, error);
    } catch (const InAGraph& error) {
        raise(driver, error);
    } catch (const CopyLost& error) {
        raise(driver, error);
    }
}

}  // namespace rekindle
