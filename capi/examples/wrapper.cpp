// The C++ interface: an all-gather, a channel, a split, and an error as an exception.
#include <cstdio>
#include <cstdlib>

#include "peerlane.hpp"

#define EXPECT(condition)                                                            \
    do {                                                                             \
        if (!(condition)) {                                                          \
            std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                            \
        }                                                                            \
    } while (0)

int main() try {
    peerlane::Group group;
    const std::uint32_t rank = group.rank(), ranks = group.ranks();
    constexpr std::size_t count = 300;
    {
        auto gather = group.prepare(peerlane::operation_options(PEERLANE_COLLECTIVE_ALL_GATHER, peerlane::dtype<float>, count));
        for (int start = 0; start < 5; start++) {
            float *input = gather.input().as<float>();
            for (std::size_t at = 0; at < count; at++) input[at] = static_cast<float>(rank * 10);
            gather.start();
            while (!gather.wait_for(std::chrono::milliseconds(100))) {}
            const float *output = gather.output().as<float>();
            for (std::size_t at = 0; at < ranks * count; at++) EXPECT(output[at] == static_cast<float>(at / count * 10));
        }
        EXPECT(!gather.report().empty());
        EXPECT(gather.report().find("\"memory\":[{") != std::string::npos);
        EXPECT(group.stats().find("\"kind\":\"heap\"") != std::string::npos);
    }
    EXPECT(group.trim() > 0);
    EXPECT(group.trim() == 0 && group.stats().find("\"kind\":\"heap\"") == std::string::npos);
    {
        using Complex = std::complex<float>;
        auto gather = group.prepare(peerlane::operation_options(PEERLANE_COLLECTIVE_ALL_GATHER, peerlane::dtype<Complex>, 3));
        Complex *input = gather.input().as<Complex>();
        for (int at = 0; at < 3; at++) input[at] = Complex(static_cast<float>(rank), static_cast<float>(at));
        gather.start();
        while (!gather.wait_for(std::chrono::milliseconds(100))) {}
        EXPECT(gather.output().bytes == ranks * 3 * sizeof(Complex));
        const Complex *output = gather.output().as<Complex>();
        for (std::uint32_t at = 0; at < 3 * ranks; at++) EXPECT(output[at] == Complex(static_cast<float>(at / 3), static_cast<float>(at % 3)));
    }
    {
        // Immediate calls on arrays of the program.
        const std::vector<double> own(count, rank + 1.0);
        std::vector<double> sum(count), all(ranks * count);
        group.run(peerlane::call_options(PEERLANE_COLLECTIVE_ALL_REDUCE, own.data(), count, sum.data(), count));
        auto call = group.start(peerlane::call_options(PEERLANE_COLLECTIVE_ALL_GATHER, own.data(), count, all.data(), ranks * count));
        while (!call.wait_for(std::chrono::milliseconds(100))) {}
        call.wait();
        for (std::size_t at = 0; at < count; at++) EXPECT(sum[at] == ranks * (ranks + 1) / 2);
        for (std::size_t at = 0; at < ranks * count; at++) EXPECT(all[at] == static_cast<double>(at / count + 1));
        try {
            group.run_on(peerlane::call_options(PEERLANE_COLLECTIVE_SCAN, own.data(), count, sum.data(), count), nullptr);
            EXPECT(false);
        } catch (const peerlane::Error &error) {
            EXPECT(std::string(error.what()).find("no streams") != std::string::npos);
        }
    }
    {
        // An all-to-all with counts for each start.
        auto exchange = group.prepare(peerlane::all_to_all_v_options(peerlane::dtype<std::int32_t>, ranks, ranks));
        std::int32_t *input = exchange.input().as<std::int32_t>();
        for (std::uint32_t to = 0; to < ranks; to++) input[to] = static_cast<std::int32_t>(rank * 10 + to);
        peerlane::SendCounts counts;
        counts.send.assign(ranks, 1);
        counts.receive = counts.send;
        exchange.run(counts);
        EXPECT(exchange.received_counts() == counts.send);
        for (std::uint32_t from = 0; from < ranks; from++) {
            EXPECT(exchange.received_displacements()[from] == from);
            EXPECT(exchange.output().as<std::int32_t>()[from] == static_cast<std::int32_t>(from * 10 + rank));
        }
        try {
            if (rank == 0) counts.send.pop_back();
            exchange.run(counts);
            EXPECT(false);
        } catch (const peerlane::Error &error) {
            EXPECT(error.status() == (rank == 0 ? PEERLANE_STATUS_INVALID_ARGUMENT : PEERLANE_STATUS_ABORTED));
            if (rank == 0) EXPECT(std::string(error.what()).find("expected " + std::to_string(ranks)) != std::string::npos);
        }
        exchange.check_starts();
        EXPECT(!exchange.report().empty());
    }
    {
        // Operations that are prepared together.
        std::vector<std::size_t> send(ranks, rank + 1), receive;
        for (std::uint32_t from = 0; from < ranks; from++) receive.push_back(from + 1);
        auto pairs = peerlane::operation_options(PEERLANE_COLLECTIVE_ALL_TO_ALL, peerlane::dtype<std::uint32_t>, 0);
        pairs.send_counts = send.data();
        pairs.receive_counts = receive.data();
        pairs.resizable = true;
        auto gather = peerlane::operation_options(PEERLANE_COLLECTIVE_ALL_GATHER, peerlane::dtype<std::uint32_t>, 2);
        gather.resizable = true;
        auto operations = group.prepare_all({pairs, gather});
        operations[0].resize_pairs(std::vector<std::size_t>(ranks, 1), std::vector<std::size_t>(ranks, 1));
        std::uint32_t *input = operations[0].input().as<std::uint32_t>();
        for (std::uint32_t to = 0; to < ranks; to++) input[to * (rank + 1)] = rank * 10 + to;
        operations[0].start();
        EXPECT(operations[0].descriptor() >= 0 && group.end_descriptor() >= 0);
        operations[0].wait();
        const std::uint32_t *output = operations[0].output().as<std::uint32_t>();
        for (std::uint32_t from = 0, begin = 0; from < ranks; begin += ++from) EXPECT(output[begin] == from * 10 + rank);

        operations[1].resize_counts(std::vector<std::size_t>(ranks, 1));
        *operations[1].input().as<std::uint32_t>() = rank;
        operations[1].run();
        for (std::uint32_t from = 0; from < ranks; from++) EXPECT(operations[1].output().as<std::uint32_t>()[from] == from);
    }
    auto part = group.split(rank % 2, 0);
    EXPECT(part.has_value());
    auto window = part->allocate(64);
    {
        auto channel = part->channel(window, 1);
        try {
            part->release(window);
            EXPECT(false);
        } catch (const peerlane::Error &) {
            EXPECT(window.memory().bytes == 64);  // The window can still be used, and released later.
        }
        auto *words = window.memory().as<std::uint64_t>();
        words[0] = rank;
        channel.put_signal(0, 0, 8, 8 * (1 + part->rank()), 0);
        channel.flush(std::chrono::seconds(10));
        if (part->rank() == 0) {
            for (std::uint32_t from = 0; from < part->ranks(); from++) {
                channel.wait(from, 0, std::chrono::seconds(10));
                EXPECT(words[1 + from] == from * 2 + rank % 2);
            }
        }
    }
    part->release(std::move(window));
    EXPECT(window.get() == nullptr);
    static_cast<void>(part->allocate(64));  // Its memory is given back with the group.
    part->close();
    try {
        group.prepare(peerlane::operation_options(PEERLANE_COLLECTIVE_BROADCAST, 99, count));
        EXPECT(false);
    } catch (const peerlane::Error &error) {
        EXPECT(error.status() == PEERLANE_STATUS_INVALID_ARGUMENT && !error.rank());
    }

    // A text is tried again only if the buffer was too small.
    int calls = 0;
    try {
        peerlane::detail::text([&](char *buffer, std::size_t size) {
            calls++;
            return peerlane_operation_report(nullptr, buffer, size);
        });
        EXPECT(false);
    } catch (const peerlane::Error &) {
        EXPECT(calls == 1);
    }
    group.close();
    return 0;
} catch (const peerlane::Error &error) {
    std::fprintf(stderr, "%s: %s\n", peerlane_status_name(error.status()), error.what());
    return 1;
}
