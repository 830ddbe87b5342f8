// Interface of the object that follows the steps of a program, implemented by `Learner` in steps/.
#pragma once

namespace rekindle {

struct Recipe;
struct StorageRecord;

// Base class of objects that are notified of the program's operators, and of its accesses to
// evicted values. All members are called with the session mutex held.
class StepObserver {
public:
    StepObserver(const StepObserver&) = delete;
    StepObserver& operator=(const StepObserver&) = delete;
    virtual ~StepObserver() = default;

    // The program ran the operator call `call`, and the engine has recorded it.
    virtual void made(const Recipe& call) = 0;
    // The program is about to access the value of `record`, which is evicted.
    virtual void about_to_access(const StorageRecord& record) = 0;

protected:
    StepObserver() = default;
};

}  // namespace rekindle
