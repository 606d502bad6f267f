// Regions over team.h for test_team.py, whose workers come in when the test says so, and leave when it says so.
//
// Built with libstdc++ inside and symbols bound within the library, so that the pool's std::thread is made by the
// pthread_create below.

#include "team.h"

#include <cerrno>
#include <csignal>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

namespace {

enum Creation { USUAL = 0, FAILING = 1, LATE = 2 };

std::atomic<int> creation{USUAL};
std::atomic<int> started{0};   // late threads that may begin
std::atomic<int> inside{0};    // workers in `held_region`
std::atomic<int> released{0};  // workers that may leave it: those with a number up to this
std::atomic<bool> leaving{false};  // the caller has done its part of it

struct Start { void* (*run)(void*); void* argument; };

void* begin_late(void* p) {
    const Start start = *static_cast<Start*>(p);
    delete static_cast<Start*>(p);
    while (started.load() == 0) usleep(100);
    return start.run(start.argument);
}

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) noexcept {
    static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
    switch (creation.load()) {
        case FAILING: return EAGAIN;
        case LATE: return create(thread, attributes, begin_late, new Start{run, argument});
        default: return create(thread, attributes, run, argument);
    }
}

extern "C" void set_creation(int how) { creation = how; }
extern "C" void start_late_threads() { started = 1; }
extern "C" void release_up_to(int worker) { released = worker; }
extern "C" int num_inside() { return inside.load(); }
extern "C" bool caller_is_leaving() { return leaving.load(); }

// `count` tasks that mark themselves in `done`; returns how many workers took one.
extern "C" int64_t region_of_tasks(int64_t threads, int64_t count, uint8_t* done) {
    std::vector<std::atomic<int>> took(threads);
    for_each(threads, count, [&](int64_t task, int64_t worker) { done[task]++, took[worker] = 1; });
    int64_t workers = 0;
    for (auto& one : took) workers += one;
    return workers;
}

// Returns when all workers came in and were released; the caller itself has nothing to do.
extern "C" void held_region(int64_t threads) {
    leaving = false, released = 0;
    auto work = [](void* p, int64_t worker) noexcept {
        if (worker > 0) {
            inside++;
            while (released.load() < worker) usleep(100);
            inside--;
            return;
        }
        while (inside.load() + 1 < *static_cast<int64_t*>(p)) sched_yield();
        leaving = true;
    };
    samewise::run_region(threads, work, &threads);
}
