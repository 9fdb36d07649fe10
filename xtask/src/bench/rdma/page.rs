//! Judges the figures and writes the page.

use super::record::{BOTH, RETRIES, Record, gather, put, sent, signal};
use super::steps::{
    COUNTED, LOSSY, PUTS, RANKS, SLOW, TOTALS, TOTALS_LOSSY, TOTALS_OF_PEER, TURNS, WIRE_SHARD,
    Wire,
};
use crate::bench::report::{self, Column, Goals, figure, size, table};

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
        Goals::default().at_least("of ib_write_bw", self.put_ratio(bytes, pairs), PUT)
    }

    fn signal_ratio(&self) -> f64 {
        self.ratio(&signal("polling"), &signal("ib_write_lat"))
    }

    fn signal_goals(&self) -> Goals {
        Goals::default().at_most("× ib_write_lat", self.signal_ratio(), SIGNAL)
    }

    fn algorithm_ratio(&self, total: u64) -> f64 {
        self.ratio(&gather("cable", total, "hierarchical"), &gather("cable", total, "direct"))
    }

    fn algorithm_goals(&self, total: u64) -> Goals {
        Goals::default().at_most("× direct", self.algorithm_ratio(total), 1.0)
    }

    /// Returns the bytes on the wire relative to the plan, of the node with more. Retries only add bytes, so the
    /// smallest value of all rounds counts.
    fn sent_ratio(&self, algorithm: &str) -> f64 {
        let [first, second] = [0, 1].map(|node| self.least(&sent(algorithm, node)));
        first.max(second) / plan_bytes(algorithm) as f64
    }

    fn sent_goals(&self, algorithm: &str) -> Goals {
        Goals::default().at_most("× its plan", self.sent_ratio(algorithm), SENT)
    }

    fn gather_ratio(&self, wire: Wire, total: u64) -> f64 {
        self.ratio(&gather(wire.name(), total, "Open MPI"), &gather(wire.name(), total, "Peerlane"))
    }

    /// Returns no goal over the cable as it is, which passes longer packets than the wires of hosts.
    fn gather_goals(&self, wire: Wire, total: u64) -> Goals {
        let ratio = Some(self.gather_ratio(wire, total)).filter(|_| wire != Wire::AsItIs);
        Goals::default().at_least("× as fast as Open MPI", ratio, 1.0)
    }

    fn ratio(&self, figure: &str, by: &str) -> f64 {
        self.median(figure) / self.median(by)
    }

    /// Returns the page.
    pub(super) fn page(&self) -> String {
        let signal_us = |side| figure(self.median(&signal(side)), 1);
        let signals: [Column<'_, ()>; 5] = [
            ("ib_write_lat, µs", &|()| signal_us("ib_write_lat")),
            ("Peerlane, µs", &|()| signal_us("polling")),
            ("ratio", &|()| figure(self.signal_ratio(), 2)),
            ("<goal", &|()| self.signal_goals().cell()),
            ("sleeping, µs", &|()| signal_us("sleeping")),
        ];
        let (both, largest) = (self.median(BOTH), TOTALS_OF_PEER.1);
        let names = PUTS.map(|(bytes, pairs, ..)| put(bytes, pairs, "ib_write_bw"));
        let greatest = |values: [f64; PUTS.len()]| values.into_iter().fold(f64::NAN, f64::max);
        let spread = |algorithm| {
            let spreads =
                totals(TOTALS).map(|total| self.spread(&gather("cable", total, algorithm)));
            figure(spreads.fold(f64::NAN, f64::max), 2)
        };
        let values = [
            ("head", self.machine.head("RDMA between two nodes of a virtual machine")),
            ("versions", self.versions.join(", ")),
            ("emulator", self.emulator.clone()),
            ("kernel", self.kernel.clone()),
            ("load", self.load.clone()),
            ("rounds", self.rounds.to_string()),
            ("turns", TURNS.to_string()),
            ("puts", self.puts()),
            ("signals", table([()], &signals)),
            ("sent", self.sent()),
            ("algorithms", self.algorithms_table()),
            ("lossy_wire", LOSSY.to_owned()),
            ("lossy", self.lossy()),
            ("slow_wire", SLOW.to_owned()),
            ("both_mbs", figure(1e3 * both, 0)),
            ("both_ms", figure(largest as f64 / both / 1e6, 1)),
            ("largest", size(largest)),
            ("gathers", self.gathers_table()),
            ("put_mbs", figure(1e3 * greatest(names.each_ref().map(|name| self.median(name))), 0)),
            ("put_spread", figure(greatest(names.each_ref().map(|name| self.spread(name))), 2)),
            ("hierarchical_spread", spread("hierarchical")),
            ("direct_spread", spread("direct")),
            ("retries", figure(self.values(RETRIES).iter().fold(0.0, |sum, one| sum + one), 0)),
        ];
        report::page(include_str!("../pages/rdma.md.in"), &values)
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
            "ib_write_bw itself moves at most 70 MB/s, and its rates differ by up to 1.00 × from",
            "the two devices began to send again 0 times",
        ] {
            assert!(page.contains(text), "{text} is not in\n{page}");
        }
    }

    #[test]
    fn missed_goals_are_named() {
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
    }
}
