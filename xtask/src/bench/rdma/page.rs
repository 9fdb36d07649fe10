//! What was measured, as tables for people.

use std::fmt::Write;

use super::goals::{self, Verdict};
use super::record::{Algorithms, Record, of};
use super::steps;
use super::wire::{self, Wire};
use crate::bench::facts::Machine;
use crate::bench::record::size;

type Written<T = ()> = Result<T, std::fmt::Error>;

impl Record {
    /// The page.
    pub(super) fn page(&self) -> Written<String> {
        let mut page = String::new();
        self.head(&mut page)?;
        self.messages(&mut page)?;
        self.nodes(&mut page)?;
        self.peer(&mut page)?;
        self.why(&mut page)?;
        Ok(page)
    }

    fn head(&self, page: &mut String) -> Written {
        let Machine { command, date, peerlane, rustc, cpu, cores, .. } = &self.machine;
        writeln!(page, "# RDMA between two nodes of a virtual machine\n")?;
        writeln!(page, "Written by `{command}` on {date}; do not edit.\n")?;
        writeln!(page, "- Peerlane {peerlane}, {rustc}; {}", self.versions.join(", "))?;
        writeln!(
            page,
            "- a virtual machine of QEMU {} on {cores} cores of {cpu}, its processors emulated where the \
             machine offers no KVM; guest kernel {}",
            self.emulator, self.kernel
        )?;
        writeln!(
            page,
            "- The two nodes are network namespaces with a soft RoCE device each (`rdma_rxe`), joined by \
             a cable (one veth pair) with an MTU of 4200. Every packet is made, summed and taken apart by \
             the guest's processors, so that only ratios within this boot mean anything."
        )?;
        writeln!(page, "- The machine's load average was {} before the boot", self.load)?;
        writeln!(
            page,
            "- A figure is that of a run, then the median of {} rounds, in which all take turns; bare messages \
             have {} turns a round.\n",
            self.rounds,
            steps::TURNS
        )
    }

    fn messages(&self, page: &mut String) -> Written {
        writeln!(page, "## Bare messages, against perftest with the same parameters\n")?;
        writeln!(
            page,
            "Puts: bytes a second, `peerlane perf --put` against `ib_write_bw`, with an engine for each queue \
             pair. perftest polls, and so does Peerlane here (`--spin 1s`); by default it looks for a while and \
             sleeps.\n"
        )?;
        writeln!(
            page,
            "| message | queue pairs | ib_write_bw, MB/s | Peerlane, MB/s | ratio | goal | sleeping, MB/s |"
        )?;
        writeln!(page, "| --: | --: | --: | --: | --: | --- | --: |")?;
        for put in &self.puts {
            writeln!(
                page,
                "| {} | {} | {:.1} | {:.1} | {:.2} | {} | {:.1} |",
                size(put.bytes),
                put.queue_pairs,
                1e3 * of(&put.theirs_gbs),
                1e3 * of(&put.ours_gbs),
                put.ratio(),
                verdict(goals::put(put)),
                1e3 * of(&put.sleeping_gbs)
            )?;
        }
        writeln!(
            page,
            "\nA put of 8 bytes with a signal behind it, one way, `peerlane perf --signal` against the \
             typical time of `ib_write_lat -s 8`, which polls the last byte.\n"
        )?;
        writeln!(page, "| ib_write_lat, µs | Peerlane, µs | ratio | goal | sleeping, µs |")?;
        writeln!(page, "| --: | --: | --: | --- | --: |")?;
        let signal = &self.signal;
        writeln!(
            page,
            "| {:.1} | {:.1} | {:.2} | {} | {:.1} |\n",
            of(&signal.theirs_us),
            of(&signal.ours_us),
            signal.ratio(),
            verdict(goals::signal(signal)),
            of(&signal.sleeping_us)
        )
    }

    fn nodes(&self, page: &mut String) -> Written {
        writeln!(page, "## 2 nodes × 2 ranks: host memory inside, RDMA between\n")?;
        writeln!(
            page,
            "Bytes that the interface of each node sent for one all-gather, counted by the kernel, with \
             headers and acknowledgements: the difference of a longer and a shorter run, and of all rounds \
             the least, because packets that are sent again only add. The hierarchical plan sends the \
             shards of a node to each other node once, the direct one to each rank there.\n"
        )?;
        writeln!(
            page,
            "| algorithm | shard | bytes of the plan | node 0 sent | node 1 sent | ratio | goal |"
        )?;
        writeln!(page, "| --- | --: | --: | --: | --: | --: | --- |")?;
        for sent in &self.sent {
            let [first, second] = sent.seen_bytes();
            writeln!(
                page,
                "| {} | {} | {} | {first:.0} | {second:.0} | {:.3} | {} |",
                sent.algorithm,
                size(sent.shard_bytes),
                sent.wanted_bytes,
                sent.ratio(),
                verdict(goals::sent(sent))
            )?;
        }
        writeln!(
            page,
            "\nTimes in ms, all algorithms in turn in the same processes, every byte compared.\n"
        )?;
        times(page, &self.algorithms, true)?;
        writeln!(
            page,
            "\nWith `{}` on the interfaces of both nodes everything completes, and every byte is right; \
             ms:\n",
            wire::LOSSY
        )?;
        times(page, &self.lossy, false)?;
        writeln!(page)
    }

    fn peer(&self, page: &mut String) -> Written {
        writeln!(page, "## Against Open MPI over TCP between the same namespaces\n")?;
        writeln!(
            page,
            "2 nodes × 2 ranks. Open MPI: shared memory inside, TCP between, ranks that wait yield. \
             Peerlane: the plan that is predicted to be fastest, host memory inside, RDMA between, \
             one queue pair to each peer, all by default.\n"
        )?;
        writeln!(
            page,
            "Three wires: the cable as it is, over which TCP passes up to 64 KiB whole; the same with \
             `gso_max_segs 1` on both interfaces, so that TCP sends packets of the MTU as soft RoCE does; and \
             a slow one, `{}` on both. The goal is judged over the second and third, as a wire between \
             hosts with an MTU of 4200 carries nothing longer.\n",
            wire::SLOW
        )?;
        let (both, (_, total, _)) = (of(&self.both_gbs), steps::TOTALS_OF_PEER);
        writeln!(
            page,
            "As many bytes as the total cross the cable, half of them each way. `ib_write_bw -b` over 4 queue \
             pairs moves {:.0} MB/s in both directions together, so those of {} alone take soft RoCE {:.1} ms.\n",
            1e3 * both,
            size(total),
            total as f64 / both / 1e6
        )?;
        writeln!(
            page,
            "| wire | total | Open MPI, ms | Peerlane, ms | its algorithm | times faster | goal |"
        )?;
        writeln!(page, "| --- | --: | --: | --: | --- | --: | --- |")?;
        for gathers in &self.gathers {
            writeln!(
                page,
                "| {} | {} | {:.2} | {:.2} | {} | {:.2} | {} |",
                gathers.wire.name(),
                size(gathers.total_bytes),
                of(&gathers.theirs_us) / 1e3,
                of(&gathers.ours_us) / 1e3,
                gathers.algorithm,
                gathers.ratio(),
                goals::gathers(gathers).map_or_else(|| "none".to_owned(), verdict)
            )?;
        }
        writeln!(page)
    }

    /// What the figures above say of the goals that are missed.
    fn why(&self, page: &mut String) -> Written {
        if self.missed().is_empty() {
            return Ok(());
        }
        writeln!(page, "## Why goals are missed\n")?;
        let is_late = |wire| {
            let mut of_wire = self.gathers.iter().filter(|one| one.wire == wire);
            of_wire.any(|one| goals::gathers(one).is_some_and(|verdict| verdict.is_err()))
        };
        if is_late(Wire::Packets) {
            let best = self.puts.iter().map(|put| of(&put.theirs_gbs)).fold(0.0, f64::max);
            writeln!(
                page,
                "- Open MPI in packets of the MTU: soft RoCE sums up every packet on the processors that the \
                 ranks run on, which TCP leaves to the network card, and between two namespaces nobody does; \
                 ib_write_bw itself moves {:.0} MB/s at best. Over the slow wire the bytes on it count, and \
                 not the processors.",
                1e3 * best
            )?;
        }
        if self.puts.iter().any(|put| goals::put(put).is_err()) {
            let spreads = self.puts.iter().map(|put| spread(&put.theirs_gbs));
            writeln!(
                page,
                "- Puts: the rates of ib_write_bw itself differ by up to {:.2} × from round to round.",
                spreads.fold(1.0, f64::max)
            )?;
        }
        if self.sent.iter().any(|sent| goals::sent(sent).is_err()) {
            let again: u64 = self.sent.iter().map(|sent| sent.again).sum();
            writeln!(
                page,
                "- Bytes on the wire: the two devices began to send again {again} times in these runs \
                 (`completer_retry_err`), which they do when an acknowledgement takes longer than 67 ms: \
                 the processors of the guest were kept from running for that long.",
            )?;
        }
        let late = |one: &&Algorithms| goals::time(one).is_err();
        if let Some(late) = self.algorithms.iter().find(late) {
            let [direct, hierarchical] = ["direct", "hierarchical"]
                .map(|name| late.times_us.get(name).map_or(f64::NAN, |times| spread(times)));
            writeln!(
                page,
                "- Hierarchical at {}: from round to round its time differs by up to {hierarchical:.2} ×, \
                 that of direct by {direct:.2} ×.",
                size(late.total_bytes)
            )?;
        }
        if goals::signal(&self.signal).is_err() {
            writeln!(
                page,
                "- Signals: a peer hears of a signal by a completion; ib_write_lat polls the memory that is \
                 written."
            )?;
        }
        Ok(())
    }
}

fn times(page: &mut String, all: &[Algorithms], judged: bool) -> Written {
    let Some(first) = all.first() else { return Ok(()) };
    let names: Vec<&String> = first.times_us.keys().collect();
    write!(page, "| total |")?;
    names.iter().try_for_each(|name| write!(page, " {name} |"))?;
    writeln!(page, "{}", if judged { " hierarchical / direct | goal |" } else { "" })?;
    let columns = names.len() + 1 + usize::from(judged);
    writeln!(page, "|{}{}", " --: |".repeat(columns), if judged { " --- |" } else { "" })?;
    for one in all {
        write!(page, "| {} |", size(one.total_bytes))?;
        names.iter().try_for_each(|name| write!(page, " {:.2} |", one.time_us(name) / 1e3))?;
        if judged {
            write!(page, " {:.2} | {} |", one.ratio(), verdict(goals::time(one)))?;
        }
        writeln!(page)?;
    }
    Ok(())
}

fn verdict(verdict: Verdict) -> String {
    match verdict {
        Ok(reached) => reached,
        Err(missed) => format!("**missed**: {missed}"),
    }
}

/// The largest by the smallest.
fn spread(rounds: &[f64]) -> f64 {
    let (least, most) = rounds
        .iter()
        .fold((f64::INFINITY, 0.0), |(least, most), one| (least.min(*one), one.max(most)));
    most / least
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::record::{Gathers, Put, Sent};
    use super::*;

    #[test]
    fn the_page_has_every_table_and_says_why() {
        let mut record = Record::new(Machine::default(), "10.0.2", "7.0", 2);
        record.puts = vec![Put {
            bytes: 65536,
            queue_pairs: 1,
            theirs_gbs: vec![0.08, 0.06],
            ours_gbs: vec![0.07],
            sleeping_gbs: vec![0.05],
        }];
        record.signal.theirs_us = vec![67.0];
        record.signal.ours_us = vec![80.0];
        record.signal.sleeping_us = vec![90.0];
        let times = |direct, hierarchical| {
            BTreeMap::from([
                ("direct".to_owned(), vec![direct]),
                ("hierarchical".to_owned(), vec![hierarchical]),
            ])
        };
        record.algorithms = vec![Algorithms { total_bytes: 1 << 20, times_us: times(4e3, 3e3) }];
        let rounds_bytes = vec![[1.06e6, 1.05e6]];
        record.sent = vec![Sent { rounds_bytes, ..Sent::new("direct", [2, 2], 1 << 18) }];
        let gathers = |wire| Gathers {
            algorithm: "hierarchical".into(),
            theirs_us: vec![2e3],
            ours_us: vec![4e3],
            ..Gathers::new(1 << 20, wire)
        };
        record.both_gbs = vec![0.2];
        record.gathers = vec![gathers(Wire::AsItIs)];
        assert!(record.missed().is_empty());
        assert!(!record.page().unwrap().contains("## Why goals are missed"));
        record.gathers.push(gathers(Wire::Packets));
        let page = record.page().unwrap();
        for wanted in [
            "| 64 KiB | 1 | 70.0 | 70.0 | 1.00 | ≥ 0.95 of ib_write_bw | 50.0 |",
            "| 67.0 | 80.0 | 1.19 | ≤ 1.3 × ib_write_lat | 90.0 |",
            "| direct | 256 KiB | 1048576 | 1060000 | 1050000 | 1.011 | ≤ 1.05 × its plan |",
            "| 1 MiB | 4.00 | 3.00 | 0.75 | ≤ 1 × direct |",
            "moves 200 MB/s in both directions together, so those of 4 MiB alone take soft RoCE 21.0 ms.",
            "- a virtual machine of QEMU 10.0.2 on ",
            "on both interfaces, so that TCP sends packets of the MTU as soft RoCE does; and a slow one, `tbf",
            "| as it is | 1 MiB | 2.00 | 4.00 | hierarchical | 0.50 | none |",
            "| packets of the MTU | 1 MiB | 2.00 | 4.00 | hierarchical | 0.50 | **missed**: ",
            "- Open MPI in packets of the MTU: soft RoCE sums up every packet",
            "ib_write_bw itself moves 70 MB/s at best.",
        ] {
            assert!(page.contains(wanted), "{wanted} is not in\n{page}");
        }
        assert!(!page.contains("- Signals"), "{page}");
        assert_eq!(record.missed().len(), 1);
    }
}
