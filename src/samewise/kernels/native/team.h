// Threads that go through a pass of many phases together, in one parallel region.
//
// A phase is a number of tasks, each done once by any thread. It is over when its tasks are done: a thread that
// the system runs late finds the others' work done and goes on, instead of being waited for. Every thread
// goes through the same phases in the same order.

#pragma once

#include "lanes.h"

#include <chrono>

#if defined(__linux__) && !defined(SAMEWISE_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace samewise {

using RegionWork = void (*)(void* data, int64_t worker) noexcept;

// work(data, 0) by the caller, and work(data, i) with 0 < i < threads by as many others as come in time. May throw
// std::bad_alloc before any work is begun.
void run_region(int64_t threads, RegionWork work, void* data);

// Threads asleep until a counter changes: `wake_all` is called after a change that may be waited for.
#if defined(__linux__) && !defined(SAMEWISE_NO_FUTEX)
static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t));
class WaitQueue {
  public:
    // Until `wake_all`; at once if the counter is not `seen`. May also return early: the caller looks again.
    void sleep_while(std::atomic<int32_t>& counter, int32_t seen) {
        syscall(SYS_futex, reinterpret_cast<int32_t*>(&counter), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    void wake_all(std::atomic<int32_t>& counter) {
        syscall(SYS_futex, reinterpret_cast<int32_t*>(&counter), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
};
#else
// A counter is changed before the mutex is taken to wake, and looked at with the mutex held until the thread is in
// `wait`: a change is seen, or the thread is woken.
class WaitQueue {
  public:
    void sleep_while(std::atomic<int32_t>& counter, int32_t seen) {
        std::unique_lock<std::mutex> lock(mutex);
        if (counter.load() == seen) changed.wait(lock);
    }
    void wake_all(std::atomic<int32_t>&) {
        { std::lock_guard<std::mutex> lock(mutex); }
        changed.notify_all();
    }

  private:
    std::mutex mutex;
    std::condition_variable changed;
};
#endif

}  // namespace samewise

namespace {

constexpr int64_t LINE = 64;  // bytes that one core writes at a time

// How long a thread reads a counter before it sleeps. Phases of a layer take 5 to 100 microseconds and end on all
// threads within a few of each other; to be woken takes about 50, more than is waited here.
constexpr std::chrono::microseconds PHASE_SPIN{30};

inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether ready() became true within `limit`. The time is looked at after every 64 pauses, which take from 0.1
// to 3 microseconds: a pause is 1 cycle on some CPUs and 140 on others.
template <class Ready>
bool spin_until(Ready ready, std::chrono::microseconds limit) {
    std::chrono::steady_clock::time_point end;
    for (bool first = true;; first = false) {
        for (int i = 0; i < 64; i++) {
            if (ready()) return true;
            pause_core();
        }
        const auto now = std::chrono::steady_clock::now();
        if (first)
            end = now + limit;
        else if (now >= end)
            return false;
    }
}

// What the threads of a region share: counters of each phase, zero at first.
class Phases {
  public:
    Phases(int64_t count, int64_t threads)
        : threads(threads),
          stride((threads + 1 + LINE / 4 - 1) / (LINE / 4) * (LINE / 4)),
          counters(new std::atomic<int32_t>[count * stride]()) {}

    const int64_t threads;
    std::atomic<int32_t>& done(int64_t phase) { return counters[phase * stride]; }
    std::atomic<int32_t>& next(int64_t phase, int64_t part) { return counters[phase * stride + 1 + part]; }

    void wait(int64_t phase, int32_t count) {
        std::atomic<int32_t>& now = done(phase);
        if (spin_until([&] { return now.load(std::memory_order_acquire) == count; }, PHASE_SPIN)) return;
        asleep.fetch_add(1);
        for (int32_t seen; (seen = now.load()) != count;) sleepers.sleep_while(now, seen);
        asleep.fetch_sub(1);
    }

    void finish(int64_t phase, int32_t tasks, int32_t count) {
        std::atomic<int32_t>& now = done(phase);
        if (now.fetch_add(tasks) + tasks == count && asleep.load() > 0) sleepers.wake_all(now);
    }

  private:
    const int64_t stride;
    std::unique_ptr<std::atomic<int32_t>[]> counters;
    alignas(LINE) std::atomic<int32_t> asleep{0};
    samewise::WaitQueue sleepers;
};

// One thread of a region.
class Team {
  public:
    Team(Phases* phases, int64_t worker) : worker(worker), phases(phases) {}

    const int64_t worker;  // below `threads`
    int64_t threads() const { return phases == nullptr ? 1 : phases->threads; }

    // The next phase: task(i) for every i below `count`. A thread takes the tasks of its own part in order, then
    // what the others have left; `before` is called ahead of its first. `alone`: not worth a second thread.
    // Neither may throw: the threads of a region allocate nothing.
    template <class Before, class Task>
    void run(int64_t count, bool alone, Before before, Task task) {
        if (phases == nullptr) {
            if (count > 0) before();
            for (int64_t i = 0; i < count; i++) task(i);
            return;
        }
        const int64_t phase = next_phase++, parts = alone ? 1 : phases->threads;
        int32_t mine = 0;
        for (int64_t p = 0; p < parts; p++) {
            const int64_t part = (worker + p) % parts, first = count * part / parts, end = count * (part + 1) / parts;
            if (first == end) continue;
            auto& next = phases->next(phase, part);
            for (int64_t i; (i = first + next.fetch_add(1, std::memory_order_relaxed)) < end; mine++) {
                if (mine == 0) before();
                task(i);
            }
        }
        if (mine > 0) phases->finish(phase, mine, int32_t(count));
        phases->wait(phase, int32_t(count));
    }
    template <class Task>
    void run(int64_t count, bool alone, Task task) {
        run(count, alone, [] {}, task);
    }

  private:
    Phases* phases;  // null: a thread by itself
    int64_t next_phase = 0;
};

// f(team) on every thread of a region that goes through at most `count` phases.
template <class F>
void in_region(int64_t threads, int64_t count, F f) {
    if (threads <= 1) {
        DefaultArithmetic arithmetic;
        f(Team(nullptr, 0));
        return;
    }
    struct Shared {
        F& f;
        Phases phases;
    } shared{f, Phases(count, threads)};
    auto work = [](void* p, int64_t worker) noexcept {
        Shared& s = *static_cast<Shared*>(p);
        DefaultArithmetic arithmetic;
        s.f(Team(&s.phases, worker));
    };
    samewise::run_region(threads, work, &shared);
}

// f(task, worker) for every task below `count`, each once, on at most `threads` workers.
template <class F>
void for_each(int64_t threads, int64_t count, F f) {
    in_region(std::min(threads, count), 1,
              [&](Team team) { team.run(count, false, [&](int64_t task) { f(task, team.worker); }); });
}

}  // namespace
