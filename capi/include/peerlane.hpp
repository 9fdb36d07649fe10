/*
 * The C++17 interface of Peerlane: owners of the handles of peerlane.h. Errors are exceptions of the type peerlane::Error.
 *
 * peerlane.h documents what each call does. Objects can be moved, and not copied. Destroy operations and channels before their group.
 * `close` and `release` are collective, and destructors are not.
 */
#ifndef PEERLANE_HPP
#define PEERLANE_HPP

#include <chrono>
#include <complex>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "peerlane.h"

namespace peerlane {

/// The error of a call, with its kind and the rank that it is about, if there is one.
class Error : public std::runtime_error {
public:
    Error(peerlane_status status, const std::string &text, int rank)
        : std::runtime_error(text), status_(status), rank_(rank) {}

    peerlane_status status() const noexcept { return status_; }

    std::optional<std::uint32_t> rank() const noexcept {
        if (rank_ < 0) return std::nullopt;
        return static_cast<std::uint32_t>(rank_);
    }

private:
    peerlane_status status_;
    int rank_;
};

inline void check(peerlane_status status) {
    if (status != PEERLANE_STATUS_OK) throw Error(status, peerlane_error_text(), peerlane_error_rank());
}

/// A part of memory of a host or a device.
struct Memory {
    void *address = nullptr;
    std::size_t bytes = 0;

    template <typename T> T *as() const noexcept { return static_cast<T *>(address); }
};

namespace detail {

/// Returns the text that a call writes. A text can become longer between two calls, but not without end.
template <typename Call>
std::string text(Call call) {
    std::vector<char> buffer(1024);
    for (int calls = 1;; calls++) {
        peerlane_status status = call(buffer.data(), buffer.size());
        if (status == PEERLANE_STATUS_OK) return buffer.data();
        std::size_t needed = peerlane_error_needed_bytes();
        if (needed <= buffer.size() || calls == 4) check(status);
        buffer.resize(needed);
    }
}

/// Returns a number of milliseconds, and 0 for a negative one, which is the time left until a deadline that has passed.
inline std::uint64_t not_negative(std::chrono::milliseconds limit) noexcept {
    return limit.count() > 0 ? static_cast<std::uint64_t>(limit.count()) : 0;
}

/// Owns a handle and destroys it.
template <typename T, peerlane_status (*Destroy)(T *)>
class Owner {
public:
    Owner() = default;
    explicit Owner(T *handle) noexcept : handle_(handle) {}
    Owner(Owner &&other) noexcept : handle_(other.take()) {}
    Owner &operator=(Owner &&other) noexcept {
        if (this != &other) {
            reset();
            handle_ = other.take();
        }
        return *this;
    }
    Owner(const Owner &) = delete;
    Owner &operator=(const Owner &) = delete;
    ~Owner() { reset(); }

    T *get() const noexcept { return handle_; }
    T *take() noexcept { return std::exchange(handle_, nullptr); }

private:
    void reset() noexcept {
        if (T *handle = take()) static_cast<void>(Destroy(handle));
    }

    T *handle_ = nullptr;
};

template <typename T> struct DType;
template <> struct DType<std::uint8_t> { static constexpr std::uint32_t value = PEERLANE_DTYPE_U8; };
template <> struct DType<std::uint16_t> { static constexpr std::uint32_t value = PEERLANE_DTYPE_U16; };
template <> struct DType<std::uint32_t> { static constexpr std::uint32_t value = PEERLANE_DTYPE_U32; };
template <> struct DType<std::uint64_t> { static constexpr std::uint32_t value = PEERLANE_DTYPE_U64; };
template <> struct DType<std::int8_t> { static constexpr std::uint32_t value = PEERLANE_DTYPE_I8; };
template <> struct DType<std::int16_t> { static constexpr std::uint32_t value = PEERLANE_DTYPE_I16; };
template <> struct DType<std::int32_t> { static constexpr std::uint32_t value = PEERLANE_DTYPE_I32; };
template <> struct DType<std::int64_t> { static constexpr std::uint32_t value = PEERLANE_DTYPE_I64; };
template <> struct DType<float> { static constexpr std::uint32_t value = PEERLANE_DTYPE_F32; };
template <> struct DType<double> { static constexpr std::uint32_t value = PEERLANE_DTYPE_F64; };
template <> struct DType<std::complex<float>> { static constexpr std::uint32_t value = PEERLANE_DTYPE_COMPLEX64; };

}  // namespace detail

/// The number of an element type, such as `dtype<float>`.
template <typename T> inline constexpr std::uint32_t dtype = detail::DType<T>::value;

inline peerlane_group_options group_options() {
    peerlane_group_options options{};
    options.header_version = PEERLANE_HEADER_VERSION;
    options.device = -1;
    return options;
}

inline peerlane_operation_options operation_options(peerlane_collective collective, std::uint32_t dtype, std::size_t count) {
    peerlane_operation_options options{};
    options.header_version = PEERLANE_HEADER_VERSION;
    options.collective = collective;
    options.dtype = dtype;
    options.count = count;
    return options;
}

inline peerlane_call_options call_options(peerlane_collective collective, std::uint32_t dtype) {
    peerlane_call_options options{};
    options.header_version = PEERLANE_HEADER_VERSION;
    options.collective = collective;
    options.dtype = dtype;
    return options;
}

/// Returns the options of a call on arrays of the program.
template <typename T>
peerlane_call_options call_options(peerlane_collective collective, const T *input, std::size_t input_count, T *output,
                                   std::size_t output_count) {
    peerlane_call_options options = call_options(collective, dtype<T>);
    options.input = input;
    options.input_count = input_count;
    options.output = output;
    options.output_count = output_count;
    return options;
}

class Operation {
public:
    explicit Operation(peerlane_operation *handle) noexcept : owner_(handle) {}

    Memory input() const { return memory(peerlane_operation_input); }
    Memory output() const { return memory(peerlane_operation_output); }
    void run() { check(peerlane_operation_run(get())); }
    void start() { check(peerlane_operation_start(get())); }
    void wait() { check(peerlane_operation_wait(get(), -1, nullptr)); }

    /// Waits for the start at most `limit`, and returns whether it is complete. A limit that is zero or negative does not wait.
    bool wait_for(std::chrono::milliseconds limit) {
        bool is_done = false;
        check(peerlane_operation_wait(get(), static_cast<std::int64_t>(detail::not_negative(limit)), &is_done));
        return is_done;
    }

    void resize(std::size_t count, std::size_t input_begin = PEERLANE_AS_PREPARED,
                std::size_t output_begin = PEERLANE_AS_PREPARED) {
        check(peerlane_operation_resize(get(), count, input_begin, output_begin));
    }

    /// Sets a number of elements for the block of each rank; there is one number for each rank.
    void resize_counts(const std::vector<std::size_t> &counts, std::size_t input_begin = PEERLANE_AS_PREPARED,
                       std::size_t output_begin = PEERLANE_AS_PREPARED) {
        check(peerlane_operation_resize_counts(get(), counts.data(), input_begin, output_begin));
    }

    /// Sets what this rank sends to each rank and receives from it; there is one number for each rank in both.
    void resize_pairs(const std::vector<std::size_t> &send, const std::vector<std::size_t> &receive,
                      std::size_t input_begin = PEERLANE_AS_PREPARED, std::size_t output_begin = PEERLANE_AS_PREPARED) {
        check(peerlane_operation_resize_pairs(get(), send.data(), receive.data(), input_begin, output_begin));
    }

    /// Returns a descriptor for an event loop, which is readable when the open start is complete or the group has ended.
    int descriptor() const {
        int descriptor = -1;
        check(peerlane_operation_descriptor(get(), &descriptor));
        return descriptor;
    }

    /// Places a start on a stream, and returns the address of its output.
    void *start_on(void *stream) {
        void *output = nullptr;
        check(peerlane_operation_start_on(get(), stream, &output));
        return output;
    }

    void end_lease() { check(peerlane_operation_end_lease(get())); }

    /// Starts the operation beside the later work of a stream, and returns the address of its output.
    void *start_beside(void *stream) {
        void *output = nullptr;
        check(peerlane_operation_start_beside(get(), stream, &output));
        return output;
    }

    /// Has later work on a stream follow the arrival of a block.
    void wait_block_on(std::uint32_t block, void *stream, std::uint32_t chunk = PEERLANE_ALL_CHUNKS) {
        check(peerlane_operation_wait_block_on(get(), block, chunk, stream));
    }

    /// Lets the start beside a stream read a block behind the work that `stream` holds now.
    void depart_on(std::uint32_t block, void *stream, std::uint32_t chunk = PEERLANE_ALL_CHUNKS) {
        check(peerlane_operation_depart_on(get(), block, chunk, stream));
    }

    void finish() { check(peerlane_operation_finish(get())); }

    /// Waits on the host until a block of the open start has arrived.
    void wait_block(std::uint32_t block, std::uint32_t chunk = PEERLANE_ALL_CHUNKS) {
        check(peerlane_operation_wait_block(get(), block, chunk, -1, nullptr));
    }

    /// Lets the open start of the host read a block of the input.
    void depart(std::uint32_t block, std::uint32_t chunk = PEERLANE_ALL_CHUNKS) {
        check(peerlane_operation_depart(get(), block, chunk));
    }

    /// Returns the chunks of the output in the order in which they arrive.
    std::vector<peerlane_chunk> arrivals() const { return order(peerlane_operation_arrivals); }
    /// Returns the chunks of the input in the order in which starts read them.
    std::vector<peerlane_chunk> departures() const { return order(peerlane_operation_departures); }

    void check_starts() const { check(peerlane_operation_check(get())); }
    peerlane_operation *get() const noexcept { return owner_.get(); }
    std::string report() const {
        return detail::text([this](char *buffer, std::size_t size) { return peerlane_operation_report(get(), buffer, size); });
    }

private:
    template <typename Call>
    Memory memory(Call call) const {
        Memory memory;
        check(call(get(), &memory.address, &memory.bytes));
        return memory;
    }

    template <typename Call>
    std::vector<peerlane_chunk> order(Call call) const {
        std::size_t count = 0;
        check(call(get(), nullptr, &count));
        std::vector<peerlane_chunk> chunks(count);
        check(call(get(), chunks.data(), &count));
        return chunks;
    }

    detail::Owner<peerlane_operation, peerlane_operation_destroy> owner_;
};

/// An immediate call that was started. Its destructor waits until the call is complete.
class Call {
public:
    explicit Call(peerlane_call *handle) noexcept : owner_(handle) {}

    void wait() { check(peerlane_call_wait(get(), -1, nullptr)); }

    /// Waits for the call at most `limit`, and returns whether it is complete. A limit that is zero or negative does not wait.
    bool wait_for(std::chrono::milliseconds limit) {
        bool is_done = false;
        check(peerlane_call_wait(get(), static_cast<std::int64_t>(detail::not_negative(limit)), &is_done));
        return is_done;
    }

    peerlane_call *get() const noexcept { return owner_.get(); }

private:
    detail::Owner<peerlane_call, peerlane_call_destroy> owner_;
};

inline peerlane_all_to_all_v_options all_to_all_v_options(std::uint32_t dtype, std::size_t send_max, std::size_t receive_max) {
    peerlane_all_to_all_v_options options{};
    options.header_version = PEERLANE_HEADER_VERSION;
    options.dtype = dtype;
    options.send_max = send_max;
    options.receive_max = receive_max;
    return options;
}

/// The numbers of elements that a start sends to each rank; each list that is not empty has one number for each rank.
struct SendCounts {
    std::vector<std::size_t> send;
    /// Where the block for each rank begins in the input; if empty, the blocks follow each other.
    std::vector<std::size_t> displacements = {};
    /// What this rank expects from each rank; if empty, any number.
    std::vector<std::size_t> receive = {};
};

/// An all-to-all in which each start has counts of its own.
class AllToAllV {
public:
    /// Takes a handle of a group with a number of ranks.
    AllToAllV(peerlane_all_to_all_v *handle, std::size_t ranks) noexcept : owner_(handle), ranks_(ranks) {}

    Memory input() const { return memory(peerlane_all_to_all_v_input); }
    Memory output() const { return memory(peerlane_all_to_all_v_output); }

    /// Makes a start and waits until its output is complete.
    void run(const SendCounts &counts) {
        check(peerlane_all_to_all_v_run(get(), list(counts.send), list(counts.displacements), list(counts.receive)));
    }

    /// Places a start on a stream, and returns the address of its output.
    void *start_on(void *stream, const SendCounts &counts) {
        void *output = nullptr;
        check(peerlane_all_to_all_v_start_on(get(), stream, list(counts.send), list(counts.displacements),
                                             list(counts.receive), &output));
        return output;
    }

    void end_lease() { check(peerlane_all_to_all_v_end_lease(get())); }
    void check_starts() const { check(peerlane_all_to_all_v_check(get())); }

    /// Returns the number of elements that the last start receives from each rank.
    std::vector<std::size_t> received_counts() const {
        std::vector<std::size_t> counts(ranks_);
        check(peerlane_all_to_all_v_received(get(), counts.data(), nullptr));
        return counts;
    }

    /// Returns the elements of the output at which these blocks begin.
    std::vector<std::size_t> received_displacements() const {
        std::vector<std::size_t> displacements(ranks_);
        check(peerlane_all_to_all_v_received(get(), nullptr, displacements.data()));
        return displacements;
    }

    std::string report() const {
        return detail::text([this](char *buffer, std::size_t size) { return peerlane_all_to_all_v_report(get(), buffer, size); });
    }

    peerlane_all_to_all_v *get() const noexcept { return owner_.get(); }

private:
    /// Returns NULL for an empty list. The C interface cannot check the length of another one.
    const std::size_t *list(const std::vector<std::size_t> &counts) const {
        if (counts.empty() || counts.size() == ranks_) return counts.empty() ? nullptr : counts.data();
        // A start without counts is refused on all ranks, so that the others do not wait for this one.
        static_cast<void>(peerlane_all_to_all_v_run(get(), nullptr, nullptr, nullptr));
        throw Error(PEERLANE_STATUS_INVALID_ARGUMENT,
                    "a list has " + std::to_string(counts.size()) + " numbers, expected " + std::to_string(ranks_), -1);
    }

    template <typename Call>
    Memory memory(Call call) const {
        Memory memory;
        check(call(get(), &memory.address, &memory.bytes));
        return memory;
    }

    detail::Owner<peerlane_all_to_all_v, peerlane_all_to_all_v_destroy> owner_;
    std::size_t ranks_;
};

class Channel {
public:
    using Limit = std::chrono::milliseconds;

    explicit Channel(peerlane_channel *handle) noexcept : owner_(handle) {}

    void put(std::uint32_t peer, std::size_t from, std::size_t bytes, std::size_t to, void *stream = nullptr) {
        check(peerlane_channel_put(get(), stream, peer, from, bytes, to));
    }

    void put_signal(std::uint32_t peer, std::size_t from, std::size_t bytes, std::size_t to, std::size_t signal, void *stream = nullptr) {
        check(peerlane_channel_put_signal(get(), stream, peer, from, bytes, to, signal));
    }

    void get(std::uint32_t peer, std::size_t from, std::size_t bytes, std::size_t to, void *stream = nullptr) {
        check(peerlane_channel_get(get(), stream, peer, from, bytes, to));
    }

    void signal(std::uint32_t peer, std::size_t signal, void *stream = nullptr) {
        check(peerlane_channel_signal(get(), stream, peer, signal));
    }

    /// Waits for a signal at most `limit`. A limit that is zero or negative does not wait.
    void wait(std::uint32_t peer, std::size_t signal, Limit limit, void *stream = nullptr) {
        check(peerlane_channel_wait(get(), stream, peer, signal, detail::not_negative(limit)));
    }

    /// Waits for this rank's puts and gets at most `limit`, as `wait`.
    void flush(Limit limit) { check(peerlane_channel_flush(get(), detail::not_negative(limit))); }
    peerlane_channel *get() const noexcept { return owner_.get(); }

private:
    detail::Owner<peerlane_channel, peerlane_channel_destroy> owner_;
};

/// A window, which `Group::release` gives back. If it is only destroyed, its memory stays until the group is closed or destroyed.
class Window {
public:
    explicit Window(peerlane_window *handle) noexcept : owner_(handle) {}

    Memory memory() const {
        Memory memory;
        check(peerlane_window_memory(get(), &memory.address, &memory.bytes));
        return memory;
    }

    peerlane_window *get() const noexcept { return owner_.get(); }

private:
    friend class Group;

    detail::Owner<peerlane_window, peerlane_window_destroy> owner_;
};

class Group {
public:
    /// Opens a group from the environment of a launcher, or as the options say. Collective.
    explicit Group(const peerlane_group_options &options = group_options()) : owner_(open(options)) {}

    std::uint32_t rank() const { return size(true); }
    std::uint32_t ranks() const { return size(false); }
    void barrier() { check(peerlane_group_barrier(get())); }
    void check_end() const { check(peerlane_group_check(get())); }

    /// Returns a descriptor for an event loop, which is readable when the group has ended.
    int end_descriptor() const {
        int descriptor = -1;
        check(peerlane_group_end_descriptor(get(), &descriptor));
        return descriptor;
    }

    void close() { check(peerlane_group_close(owner_.take())); }
    peerlane_group *get() const noexcept { return owner_.get(); }

    /// Returns what the group holds on this rank as one JSON object.
    std::string stats() const {
        return detail::text([this](char *buffer, std::size_t size) { return peerlane_group_stats(get(), buffer, size); });
    }

    /// Releases the memory of the heap that no operation uses, and returns its bytes. Collective.
    std::uint64_t trim() {
        std::uint64_t bytes = 0;
        check(peerlane_group_trim(get(), &bytes));
        return bytes;
    }

    std::string selection() const {
        return detail::text([this](char *buffer, std::size_t size) { return peerlane_group_selection(get(), buffer, size); });
    }

    /// Returns nothing on a rank with a negative color.
    std::optional<Group> split(std::int64_t color, std::int64_t key) {
        peerlane_group *part = nullptr;
        check(peerlane_group_split(get(), color, key, &part));
        return part == nullptr ? std::nullopt : std::optional<Group>(Group(part));
    }

    Group shrink() {
        peerlane_group *rest = nullptr;
        check(peerlane_group_shrink(get(), &rest));
        return Group(rest);
    }

    Operation prepare(const peerlane_operation_options &options) {
        peerlane_operation *operation = nullptr;
        check(peerlane_operation_prepare(get(), &options, &operation));
        return Operation(operation);
    }

    /// Prepares several operations in one agreement of all ranks.
    std::vector<Operation> prepare_all(const std::vector<peerlane_operation_options> &options) {
        std::vector<peerlane_operation *> handles(options.size());
        std::vector<Operation> operations;
        operations.reserve(options.size());
        check(peerlane_operation_prepare_all(get(), options.data(), options.size(), handles.data()));
        for (peerlane_operation *handle : handles) operations.emplace_back(handle);
        return operations;
    }

    AllToAllV prepare(const peerlane_all_to_all_v_options &options) {
        peerlane_all_to_all_v *exchange = nullptr;
        const std::size_t count = ranks();
        check(peerlane_all_to_all_v_prepare(get(), &options, &exchange));
        return AllToAllV(exchange, count);
    }

    /// Makes an immediate call, and waits until its output is complete.
    void run(const peerlane_call_options &options) { check(peerlane_call_run(get(), &options)); }

    /// Starts an immediate call. Its memory is in use until the result is complete or destroyed.
    Call start(const peerlane_call_options &options) {
        peerlane_call *call = nullptr;
        check(peerlane_call_start(get(), &options, &call));
        return Call(call);
    }

    /// Enqueues an immediate call on a stream.
    void run_on(const peerlane_call_options &options, void *stream) {
        check(peerlane_call_run_on(get(), &options, stream));
    }

    Window allocate(std::size_t bytes) {
        peerlane_window *window = nullptr;
        check(peerlane_window_allocate(get(), bytes, &window));
        return Window(window);
    }

    Window window_over(void *memory, std::size_t bytes) {
        peerlane_window *window = nullptr;
        check(peerlane_window_over(get(), memory, bytes, &window));
        return Window(window);
    }

    Window window_over_descriptor(int descriptor, std::uint64_t offset, std::size_t bytes) {
        peerlane_window *window = nullptr;
        check(peerlane_window_over_descriptor(get(), descriptor, offset, bytes, &window));
        return Window(window);
    }

    /// Gives the memory of a window back. If it throws, the window is as before, and the call can be repeated.
    void release(Window &window) {
        check(peerlane_window_release(get(), window.get()));
        window.owner_.take();
    }

    void release(Window &&window) { release(window); }

    Channel channel(const Window &window, std::size_t signals) {
        peerlane_channel *channel = nullptr;
        check(peerlane_channel_open(get(), window.get(), signals, &channel));
        return Channel(channel);
    }

private:
    explicit Group(peerlane_group *handle) noexcept : owner_(handle) {}

    static peerlane_group *open(const peerlane_group_options &options) {
        peerlane_group *group = nullptr;
        check(peerlane_group_open(&options, &group));
        return group;
    }

    std::uint32_t size(bool of_rank) const {
        std::uint32_t rank = 0, ranks = 0;
        check(peerlane_group_rank(get(), &rank, &ranks));
        return of_rank ? rank : ranks;
    }

    detail::Owner<peerlane_group, peerlane_group_destroy> owner_;
};

}  // namespace peerlane

#endif
