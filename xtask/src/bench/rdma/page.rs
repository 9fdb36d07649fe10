//! Judges the figures and writes the page.

use super::record::{BOTH, RETRIES, Record, gather, put, sent, signal};
use super::steps::{
    COUNTED, LOSSY, PUTS, RANKS, SLOW, TOTALS, TOTALS_LOSSY, TOTALS_OF_PEER, TURNS, WIRE_SHARD,
    Wire,
};
use crate::bench::report::{Column, Goals, figure, size, table};

/// The minimum rate of puts relative to ib_write_bw.
const PUT: f64 = 0.95;
/// The maximum time of a put and a signal relative to ib_write_lat.
const SIGNAL: f64 = 1.3;
/// The maximum number of bytes on the wire relative to the plan, for headers and acknowledgements.
const SENT: f64 = 1.05;

/// Returns the totals of all-gathers.
fn totals((min, max, factor): (u64, u64, u64)) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(min), move |total| Some(total * factor))
        .take_while(move |total| *total <= max)
}

/// Returns the bytes that a node sends by the plan: each shard once to the other node, or to each rank there.
fn plan_bytes(algorithm: &str) -> u64 {
    let [own, others] = RANKS.map(|ranks| ranks as u64);
    WIRE_SHARD * if algorithm == "hierarchical" { own } else { own * others }
}

impl Record {
    /// Returns all goals, each with what it is about.
    pub(super) fn goals(&self) -> Vec<(String, Goals)> {
        let mut goals = vec![("put of 8 B and signal".to_owned(), self.signal_goals())];
        for (bytes, pairs, ..) in PUTS {
            let what = format!("put of {} over {pairs} queue pairs", size(bytes));
            goals.push((what, self.put_goals(bytes, pairs)));
        }
        for total in totals(TOTALS) {
            goals.push((format!("hierarchical, {}", size(total)), self.algorithm_goals(total)));
        }
        for algorithm in COUNTED {
            goals.push((format!("{algorithm} on the wire"), self.sent_goals(algorithm)));
        }
        for (wire, total) in gathers() {
            let what = format!("all-gather of {}, {}", size(total), wire.name());
            goals.push((what, self.gather_goals(wire, total)));
        }
        goals
    }

    fn put_ratio(&self, bytes: u64, pairs: u32) -> f64 {
        self.ratio(&put(bytes, pairs, "polling"), &put(bytes, pairs, "ib_write_bw"))
    }

    fn put_goals(&self, bytes: u64, pairs: u32) -> Goals {
        let mut goals = Goals::default();
        goals.at_least("of ib_write_bw", self.put_ratio(bytes, pairs), PUT);
        goals
    }

    fn signal_ratio(&self) -> f64 {
        self.ratio(&signal("polling"), &signal("ib_write_lat"))
    }

    fn signal_goals(&self) -> Goals {
        let mut goals = Goals::default();
        goals.at_most("× ib_write_lat", self.signal_ratio(), SIGNAL);
        goals
    }

    fn algorithm_ratio(&self, total: u64) -> f64 {
        self.ratio(&gather("cable", total, "hierarchical"), &gather("cable", total, "direct"))
    }

    fn algorithm_goals(&self, total: u64) -> Goals {
        let mut goals = Goals::default();
        goals.at_most("× direct", self.algorithm_ratio(total), 1.0);
        goals
    }

    /// Returns the bytes on the wire relative to the plan, of the node with more. Retries only add bytes, so the
    /// smallest value of all rounds counts.
    fn sent_ratio(&self, algorithm: &str) -> f64 {
        let [first, second] = [0, 1].map(|node| self.least(&sent(algorithm, node)));
        first.max(second) / plan_bytes(algorithm) as f64
    }

    fn sent_goals(&self, algorithm: &str) -> Goals {
        let mut goals = Goals::default();
        goals.at_most("× its plan", self.sent_ratio(algorithm), SENT);
        goals
    }

    fn gather_ratio(&self, wire: Wire, total: u64) -> f64 {
        self.ratio(&gather(wire.name(), total, "Open MPI"), &gather(wire.name(), total, "Peerlane"))
    }

    /// Returns no goal over the cable as it is, which passes longer packets than the wires of hosts.
    fn gather_goals(&self, wire: Wire, total: u64) -> Goals {
        let mut goals = Goals::default();
        let ratio = Some(self.gather_ratio(wire, total)).filter(|_| wire != Wire::AsItIs);
        goals.at_least("× as fast as Open MPI", ratio, 1.0);
        goals
    }

    fn ratio(&self, figure: &str, by: &str) -> f64 {
        self.median(figure) / self.median(by)
    }

    /// Returns the page.
    pub(super) fn page(&self) -> String {
        let Self { emulator, kernel, load, rounds, versions, .. } = self;
        let signal_us = |side| figure(self.median(&signal(side)), 1);
        let signals: [Column<'_, ()>; 5] = [
            ("ib_write_lat, µs", &|()| signal_us("ib_write_lat")),
            ("Peerlane, µs", &|()| signal_us("polling")),
            ("ratio", &|()| figure(self.signal_ratio(), 2)),
            ("<goal", &|()| self.signal_goals().cell()),
            ("sleeping, µs", &|()| signal_us("sleeping")),
        ];
        let (both, largest) = (self.median(BOTH), TOTALS_OF_PEER.1);
        format!(
            "{head}- {versions}\n\
             - A virtual machine of QEMU {emulator}, with emulated processors if the machine offers no KVM; guest \
             kernel {kernel}. The machine's load average was {load} before the boot.\n\
             - The two nodes are network namespaces with a soft RoCE device each (`rdma_rxe`), connected by a \
             cable (one veth pair) with an MTU of 4200. The guest's processors make, sum and take apart every \
             packet, so that only ratios within this boot mean anything.\n\
             - A figure is that of a run, then the median of {rounds} rounds, in which all take turns. Bare \
             messages have {TURNS} turns per round.\n\
             \n## Bare messages, against perftest with the same parameters\n\n\
             Puts: bytes per second, `peerlane perf --put` against `ib_write_bw`, with an engine for each queue \
             pair. perftest polls, and so does Peerlane here (`--spin 1s`); by default it spins for a while and \
             sleeps.\n\n{puts}\n\
             A put of 8 bytes with a signal behind it, one way, `peerlane perf --signal` against the typical time \
             of `ib_write_lat -s 8`, which polls the last byte.\n\n{signals}\
             \n## 2 nodes × 2 ranks: host memory inside, RDMA between\n\n\
             Bytes that the interface of each node sent for one all-gather, counted by the kernel, with headers \
             and acknowledgements: the difference of a longer and a shorter run, and of all rounds the least, \
             because retries only add. The hierarchical plan sends the shards of a node to each other node once, \
             the direct one to each rank there.\n\n{sent}\n\
             Times in ms, all algorithms in turn in the same processes, every byte compared.\n\n{algorithms}\n\
             With `{LOSSY}` on the interfaces of both nodes everything completes, and every byte is right; \
             ms:\n\n{lossy}\
             \n## Against Open MPI over TCP between the same namespaces\n\n\
             2 nodes × 2 ranks. Open MPI: shared memory inside, TCP between, waiting ranks yield. Peerlane: the \
             plan with the shortest predicted time, host memory inside, RDMA between, one queue pair to each \
             peer, all by default.\n\n\
             Three wires: the cable as it is, over which TCP passes up to 64 KiB whole; the same with \
             `gso_max_segs 1` on both interfaces, so that TCP sends packets of the MTU as soft RoCE does; and a \
             slow one, `{SLOW}` on both. The second and third have goals, because a wire between hosts with an \
             MTU of 4200 carries nothing longer.\n\n\
             As many bytes as the total cross the cable, half of them each way. `ib_write_bw -b` over 4 queue \
             pairs moves {both_mbs} MB/s in both directions together, so those of {largest} take soft RoCE \
             {both_ms} ms.\n\n{gathers}{why}",
            head = self.machine.head("RDMA between two nodes of a virtual machine"),
            versions = versions.join(", "),
            puts = self.puts(),
            signals = table([()], &signals),
            sent = self.sent(),
            algorithms = self.algorithms_table(),
            lossy = self.lossy(),
            both_mbs = figure(1e3 * both, 0),
            both_ms = figure(largest as f64 / both / 1e6, 1),
            largest = size(largest),
            gathers = self.gathers_table(),
            why = self.why(),
        )
    }

    fn puts(&self) -> String {
        let rate = |bytes, pairs, side| figure(1e3 * self.median(&put(bytes, pairs, side)), 1);
        table(
            PUTS.map(|(bytes, pairs, ..)| (bytes, pairs)),
            &[
                ("message", &|(bytes, _)| size(*bytes)),
                ("queue pairs", &|(_, pairs)| pairs.to_string()),
                ("ib_write_bw, MB/s", &|(bytes, pairs)| rate(*bytes, *pairs, "ib_write_bw")),
                ("Peerlane, MB/s", &|(bytes, pairs)| rate(*bytes, *pairs, "polling")),
                ("ratio", &|(bytes, pairs)| figure(self.put_ratio(*bytes, *pairs), 2)),
                ("<goal", &|(bytes, pairs)| self.put_goals(*bytes, *pairs).cell()),
                ("sleeping, MB/s", &|(bytes, pairs)| rate(*bytes, *pairs, "sleeping")),
            ],
        )
    }

    fn sent(&self) -> String {
        let bytes = |algorithm: &str, node| figure(self.least(&sent(algorithm, node)), 0);
        table(
            COUNTED,
            &[
                ("<algorithm", &|algorithm| (*algorithm).to_owned()),
                ("shard", &|_| size(WIRE_SHARD)),
                ("bytes of the plan", &|algorithm| plan_bytes(algorithm).to_string()),
                ("node 0 sent", &|algorithm| bytes(algorithm, 0)),
                ("node 1 sent", &|algorithm| bytes(algorithm, 1)),
                ("ratio", &|algorithm| figure(self.sent_ratio(algorithm), 3)),
                ("<goal", &|algorithm| self.sent_goals(algorithm).cell()),
            ],
        )
    }

    fn algorithms_table(&self) -> String {
        let time =
            |total, algorithm| figure(self.median(&gather("cable", total, algorithm)) / 1e3, 2);
        table(
            totals(TOTALS),
            &[
                ("total", &|total| size(*total)),
                ("direct", &|total| time(*total, "direct")),
                ("hierarchical", &|total| time(*total, "hierarchical")),
                ("hierarchical / direct", &|total| figure(self.algorithm_ratio(*total), 2)),
                ("<goal", &|total| self.algorithm_goals(*total).cell()),
            ],
        )
    }

    fn lossy(&self) -> String {
        let time = |total, name: &str| figure(self.median(&gather("lossy", total, name)) / 1e3, 2);
        let names = self.algorithms("lossy", TOTALS_LOSSY.0);
        let times: Vec<_> =
            names.iter().map(|name| move |total: &u64| time(*total, name)).collect();
        let mut columns: Vec<Column<'_, u64>> = vec![("total", &|total| size(*total))];
        for (name, time) in names.iter().zip(&times) {
            columns.push((name, time));
        }
        table(totals(TOTALS_LOSSY), &columns)
    }

    fn gathers_table(&self) -> String {
        let time = |wire: Wire, total, side| {
            figure(self.median(&gather(wire.name(), total, side)) / 1e3, 2)
        };
        let choice = |wire: Wire, total| {
            let choice = self.choices.get(&gather(wire.name(), total, "Peerlane"));
            choice.cloned().unwrap_or_default()
        };
        table(
            gathers(),
            &[
                ("<wire", &|(wire, _)| wire.name().to_owned()),
                ("total", &|(_, total)| size(*total)),
                ("Open MPI, ms", &|(wire, total)| time(*wire, *total, "Open MPI")),
                ("Peerlane, ms", &|(wire, total)| time(*wire, *total, "Peerlane")),
                ("<its algorithm", &|(wire, total)| choice(*wire, *total)),
                ("times faster", &|(wire, total)| figure(self.gather_ratio(*wire, *total), 2)),
                ("<goal", &|(wire, total)| self.gather_goals(*wire, *total).cell()),
            ],
        )
    }

    /// Returns a section about the goals that are missed, or nothing.
    fn why(&self) -> String {
        let mut why = String::new();
        if gathers().any(|(wire, total)| {
            wire == Wire::Packets && self.gather_goals(wire, total).are_missed()
        }) {
            let rates =
                PUTS.map(|(bytes, pairs, ..)| self.median(&put(bytes, pairs, "ib_write_bw")));
            why += &format!(
                "- Open MPI in packets of the MTU: soft RoCE sums up every packet on the processors that the ranks \
                 run on. TCP leaves this to the NIC, and between two namespaces nothing does it. ib_write_bw \
                 itself moves at most {} MB/s. Over the slow wire the number of bytes counts, and not the \
                 processors.\n",
                figure(1e3 * rates.into_iter().fold(f64::NAN, f64::max), 0)
            );
        }
        if PUTS.iter().any(|(bytes, pairs, ..)| self.put_goals(*bytes, *pairs).are_missed()) {
            let spreads =
                PUTS.map(|(bytes, pairs, ..)| self.spread(&put(bytes, pairs, "ib_write_bw")));
            why += &format!(
                "- Puts: the rates of ib_write_bw itself differ by up to {} × from round to round.\n",
                figure(spreads.into_iter().fold(f64::NAN, f64::max), 2)
            );
        }
        if COUNTED.iter().any(|algorithm| self.sent_goals(algorithm).are_missed()) {
            why += &format!(
                "- Bytes on the wire: the two devices began to send again {} times in these runs \
                 (`completer_retry_err`). They do so if an acknowledgement takes longer than 67 ms, because the \
                 guest's processors did not run for that long.\n",
                figure(self.values(RETRIES).iter().sum::<f64>(), 0)
            );
        }
        if let Some(late) = totals(TOTALS).find(|total| self.algorithm_goals(*total).are_missed()) {
            let [direct, hierarchical] =
                ["direct", "hierarchical"].map(|name| self.spread(&gather("cable", late, name)));
            why += &format!(
                "- Hierarchical at {}: from round to round its time differs by up to {} ×, that of direct by {} ×.\n",
                size(late),
                figure(hierarchical, 2),
                figure(direct, 2)
            );
        }
        if self.signal_goals().are_missed() {
            why += "- Signals: a peer learns of a signal by a completion; ib_write_lat polls the written memory.\n";
        }
        if why.is_empty() { why } else { format!("\n## Why goals are missed\n\n{why}") }
    }
}

/// Returns the all-gathers against Open MPI: the wire and the total.
fn gathers() -> impl Iterator<Item = (Wire, u64)> {
    Wire::ALL.into_iter().flat_map(|wire| totals(TOTALS_OF_PEER).map(move |total| (wire, total)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a record in which every goal is reached.
    fn record() -> Record {
        let mut record = Record { emulator: "10.0.2".into(), rounds: 2, ..Record::default() };
        for (bytes, pairs, ..) in PUTS {
            for (side, rate) in [("ib_write_bw", 0.07), ("polling", 0.07), ("sleeping", 0.05)] {
                record.add(put(bytes, pairs, side), rate);
            }
        }
        for (side, time) in [("ib_write_lat", 67.0), ("polling", 80.0), ("sleeping", 90.0)] {
            record.add(signal(side), time);
        }
        for total in totals(TOTALS) {
            record.add(gather("cable", total, "direct"), 4e3);
            record.add(gather("cable", total, "hierarchical"), 3e3);
        }
        for algorithm in COUNTED {
            for node in 0..2 {
                record.add(sent(algorithm, node), 1.04 * plan_bytes(algorithm) as f64);
                record.add(sent(algorithm, node), 2.0 * plan_bytes(algorithm) as f64);
            }
        }
        for (wire, total) in gathers() {
            record.add(gather(wire.name(), total, "Open MPI"), 4e3);
            record.add(gather(wire.name(), total, "Peerlane"), 2e3);
        }
        record.add(BOTH.to_owned(), 0.2);
        for algorithm in ["ring", "direct"] {
            record.add(gather("lossy", TOTALS_LOSSY.0, algorithm), 9e3);
        }
        record
    }

    fn missed(record: &Record) -> Vec<String> {
        let missed = record.goals().into_iter().filter(|(_, goals)| goals.are_missed());
        missed.map(|(what, goals)| format!("{what}: {}", goals.cell())).collect()
    }

    fn set(record: &mut Record, name: String, value: f64) {
        record.figures.insert(name, vec![value]);
    }

    #[test]
    fn the_page_has_every_table() {
        let record = record();
        let page = record.page();
        assert_eq!(missed(&record), [""; 0]);
        assert!(!page.contains("## Why goals are missed"));
        for text in [
            "| 64 KiB | 1 | 70.0 | 70.0 | 1.00 | ≥ 0.95 of ib_write_bw | 50.0 |",
            "| 67.0 | 80.0 | 1.19 | ≤ 1.3 × ib_write_lat | 90.0 |",
            "| direct | 256 KiB | 1048576 | 1090519 | 1090519 | 1.040 | ≤ 1.05 × its plan |",
            "| hierarchical | 256 KiB | 524288 | 545260 |",
            "| 1 MiB | 4.00 | 3.00 | 0.75 | ≤ 1 × direct |",
            "| total | direct | ring |\n| --: | --: | --: |\n| 64 KiB | 9.00 | 9.00 |",
            "moves 200 MB/s in both directions together, so those of 4 MiB take soft RoCE 21.0 ms.",
            "- A virtual machine of QEMU 10.0.2, ",
            "on both interfaces, so that TCP sends packets of the MTU as soft RoCE does; and a slow one, `tbf",
            "| as it is | 1 MiB | 4.00 | 2.00 |  | 2.00 | – |",
        ] {
            assert!(page.contains(text), "{text} is not in\n{page}");
        }
    }

    #[test]
    fn missed_goals_are_named_and_explained() {
        let mut record = record();
        set(&mut record, put(65536, 4, "polling"), 0.063);
        set(&mut record, signal("polling"), 93.8);
        set(&mut record, gather("packets of the MTU", 1 << 20, "Peerlane"), 8e3);
        set(&mut record, gather("slow", 1 << 20, "Peerlane"), 8e3);
        set(&mut record, gather("as it is", 1 << 20, "Peerlane"), 8e3);
        record.figures.remove(&sent("direct", 0));
        record.figures.remove(&sent("direct", 1));
        assert_eq!(
            missed(&record),
            [
                "put of 8 B and signal: **missed**: ≤ 1.3 × ib_write_lat (found 1.400)",
                "put of 64 KiB over 4 queue pairs: **missed**: ≥ 0.95 of ib_write_bw (found 0.900)",
                "direct on the wire: **missed**: ≤ 1.05 × its plan (found –)",
                "all-gather of 1 MiB, packets of the MTU: **missed**: ≥ 1 × as fast as Open MPI (found 0.500)",
                "all-gather of 1 MiB, slow: **missed**: ≥ 1 × as fast as Open MPI (found 0.500)",
            ]
        );
        let page = record.page();
        for text in [
            "- Open MPI in packets of the MTU: soft RoCE sums up every packet",
            "ib_write_bw itself moves at most 70 MB/s.",
            "- Puts: the rates of ib_write_bw itself differ by up to 1.00 ×",
            "- Signals: a peer learns",
        ] {
            assert!(page.contains(text), "{text} is not in\n{page}");
        }
    }
}
