//! Judges the figures and writes the page.

use super::steps::{
    COUNTED, LOSSY, PUTS, RANKS, SLOW, TOTALS, TOTALS_LOSSY, TOTALS_OF_PEER, TURNS, WIRE_BLOCK,
    Wire,
};
use super::{BOTH, RETRIES, Record, gather, put, sent, signal};
use crate::bench::report::{self, Column, Goals, figure, size};
use crate::bench::sizes;

/// The minimum rate of puts relative to ib_write_bw.
const PUT: f64 = 0.95;
/// The maximum time of a put and a signal relative to ib_write_lat.
const SIGNAL: f64 = 1.3;
/// The maximum number of bytes on the wire relative to the plan, for headers and acknowledgements.
const SENT: f64 = 1.05;

/// Returns the bytes that a node sends by the plan: each block once to the other node, or to each rank there.
fn plan_bytes(algorithm: &str) -> u64 {
    let [own, others] = RANKS.map(|ranks| ranks as u64);
    WIRE_BLOCK * if algorithm == "hierarchical" { own } else { own * others }
}

/// A line of a table.
struct Line {
    /// The name of the line among goals.
    what: String,
    goals: Goals,
    cells: Vec<String>,
}

fn text(lines: Vec<Line>) -> String {
    lines.into_iter().map(|line| report::joined(line.cells)).collect()
}

impl Record {
    /// Returns all goals, each with what it is about.
    pub(super) fn goals(&self) -> impl Iterator<Item = (String, Goals)> {
        let tables = [self.signals(), self.puts(), self.algorithms(), self.sent(), self.gathers()];
        tables.into_iter().flatten().map(|line| (line.what, line.goals))
    }

    /// Compares puts with those of ib_write_bw.
    fn puts(&self) -> Vec<Line> {
        let line = |(bytes, pairs, ..): (u64, u32, u32, u32)| {
            let rate = |side| 1e3 * self.median(&put(bytes, pairs, side));
            let [theirs, ours, sleeping] = ["ib_write_bw", "polling", "sleeping"].map(rate);
            let goals = Goals::default().at_least("of ib_write_bw", ours / theirs, PUT);
            let cells = vec![
                size(bytes),
                pairs.to_string(),
                figure(theirs, 1),
                figure(ours, 1),
                figure(ours / theirs, 2),
                goals.cell(),
                figure(sleeping, 1),
            ];
            Line { what: format!("put of {} over {pairs} queue pairs", size(bytes)), goals, cells }
        };
        PUTS.map(line).into()
    }

    /// Compares a put and a signal with ib_write_lat.
    fn signals(&self) -> Vec<Line> {
        let time = |side| self.median(&signal(side));
        let [theirs, ours, sleeping] = ["ib_write_lat", "polling", "sleeping"].map(time);
        let goals = Goals::default().at_most("× ib_write_lat", ours / theirs, SIGNAL);
        let cells = vec![
            figure(theirs, 1),
            figure(ours, 1),
            figure(ours / theirs, 2),
            goals.cell(),
            figure(sleeping, 1),
        ];
        vec![Line { what: "put of 8 B and signal".to_owned(), goals, cells }]
    }

    /// Compares the bytes on the wire with the plan, of the node with more. Retries only add bytes, so the smallest
    /// value of all rounds counts.
    fn sent(&self) -> Vec<Line> {
        let line = |algorithm| {
            let nodes = [0, 1].map(|node| self.least(&sent(algorithm, node)));
            let ratio = nodes[0].max(nodes[1]) / plan_bytes(algorithm) as f64;
            let goals = Goals::default().at_most("× its plan", ratio, SENT);
            let cells = vec![
                algorithm.to_owned(),
                size(WIRE_BLOCK),
                plan_bytes(algorithm).to_string(),
                figure(nodes[0], 0),
                figure(nodes[1], 0),
                figure(ratio, 3),
                goals.cell(),
            ];
            Line { what: format!("{algorithm} on the wire"), goals, cells }
        };
        COUNTED.map(line).into()
    }

    /// Compares the hierarchical all-gather with the direct one.
    fn algorithms(&self) -> Vec<Line> {
        let line = |total| {
            let time = |name| self.milliseconds("cable", total, name);
            let [direct, hierarchical] = ["direct", "hierarchical"].map(time);
            let ratio = hierarchical / direct;
            let goals = Goals::default().at_most("× direct", ratio, 1.0);
            let times = [direct, hierarchical, ratio].map(|value| figure(value, 2));
            let cells = [vec![size(total)], times.into(), vec![goals.cell()]].concat();
            Line { what: format!("hierarchical, {}", size(total)), goals, cells }
        };
        sizes(TOTALS).map(line).collect()
    }

    /// Compares all-gathers with Open MPI's. There is no goal over the cable as it is, which passes longer packets
    /// than the wires of hosts.
    fn gathers(&self) -> Vec<Line> {
        let line = |(wire, total): (Wire, u64)| {
            let time = |side| self.milliseconds(wire.name(), total, side);
            let [theirs, ours] = ["Open MPI", "Peerlane"].map(time);
            let judged = Some(theirs / ours).filter(|_| wire != Wire::AsItIs);
            let goals = Goals::default().at_least("× as fast as Open MPI", judged, 1.0);
            let choice = self.choices.get(&gather(wire.name(), total, "Peerlane"));
            let cells = vec![
                wire.name().to_owned(),
                size(total),
                figure(theirs, 2),
                figure(ours, 2),
                choice.cloned().unwrap_or_default(),
                figure(theirs / ours, 2),
                goals.cell(),
            ];
            let what = format!("all-gather of {}, {}", size(total), wire.name());
            Line { what, goals, cells }
        };
        let pairs = |wire| sizes(TOTALS_OF_PEER).map(move |total| (wire, total));
        Wire::COMPARED.into_iter().flat_map(pairs).map(line).collect()
    }

    /// Returns the median time of an all-gather.
    fn milliseconds(&self, wire: &str, total: u64, side: &str) -> f64 {
        self.median(&gather(wire, total, side)) / 1e3
    }

    /// Returns the times over the wire that loses packets, with a column for each algorithm.
    fn lossy(&self) -> String {
        let names = self.algorithms_over("lossy", TOTALS_LOSSY.0);
        let time = |total, name| figure(self.milliseconds("lossy", total, name), 2);
        let times: Vec<_> =
            names.iter().map(|name| move |total: &u64| time(*total, name)).collect();
        let mut columns: Vec<Column<'_, u64>> = vec![("total", &|total| size(*total))];
        for (name, time) in names.iter().zip(&times) {
            columns.push((name, time));
        }
        report::table(sizes(TOTALS_LOSSY), &columns)
    }

    /// Returns the page.
    pub(super) fn page(&self) -> String {
        let (both, largest) = (self.median(BOTH), TOTALS_OF_PEER.1);
        let names = PUTS.map(|(bytes, pairs, ..)| put(bytes, pairs, "ib_write_bw"));
        let greatest = |values: [f64; PUTS.len()]| values.into_iter().fold(f64::NAN, f64::max);
        let spread = |algorithm| {
            let spreads =
                sizes(TOTALS).map(|total| self.spread(&gather("cable", total, algorithm)));
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
            ("puts", text(self.puts())),
            ("signals", text(self.signals())),
            ("sent", text(self.sent())),
            ("algorithms", text(self.algorithms())),
            ("lossy_wire", LOSSY.to_owned()),
            ("lossy", self.lossy()),
            ("slow_wire", SLOW.to_owned()),
            ("both_mbs", figure(1e3 * both, 0)),
            ("both_ms", figure(largest as f64 / both / 1e6, 1)),
            ("largest", size(largest)),
            ("gathers", text(self.gathers())),
            ("put_mbs", figure(1e3 * greatest(names.each_ref().map(|name| self.median(name))), 0)),
            ("put_spread", figure(greatest(names.each_ref().map(|name| self.spread(name))), 2)),
            ("hierarchical_spread", spread("hierarchical")),
            ("direct_spread", spread("direct")),
            ("retries", figure(self.values(RETRIES).iter().fold(0.0, |sum, one| sum + one), 0)),
        ];
        report::page(include_str!("../pages/rdma.md.in"), &values)
    }
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
        for total in sizes(TOTALS) {
            record.add(gather("cable", total, "direct"), 4e3);
            record.add(gather("cable", total, "hierarchical"), 3e3);
        }
        for algorithm in COUNTED {
            for node in 0..2 {
                record.add(sent(algorithm, node), 1.04 * plan_bytes(algorithm) as f64);
                record.add(sent(algorithm, node), 2.0 * plan_bytes(algorithm) as f64);
            }
        }
        for wire in Wire::COMPARED.map(Wire::name) {
            for total in sizes(TOTALS_OF_PEER) {
                record.add(gather(wire, total, "Open MPI"), 4e3);
                record.add(gather(wire, total, "Peerlane"), 2e3);
            }
        }
        record.add(BOTH.to_owned(), 0.2);
        for algorithm in ["ring", "direct"] {
            record.add(gather("lossy", TOTALS_LOSSY.0, algorithm), 9e3);
        }
        record
    }

    fn missed(record: &Record) -> Vec<String> {
        let missed = record.goals().filter(|(_, goals)| goals.are_missed());
        missed.map(|(what, goals)| format!("{what}: {}", goals.cell())).collect()
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
        for (name, value) in [
            (put(65536, 4, "polling"), 0.063),
            (signal("polling"), 93.8),
            (gather("packets of the MTU", 1 << 20, "Peerlane"), 8e3),
            (gather("slow", 1 << 20, "Peerlane"), 8e3),
            (gather("as it is", 1 << 20, "Peerlane"), 8e3),
        ] {
            record.figures.insert(name, vec![value]);
        }
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
