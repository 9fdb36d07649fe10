//! What was measured, as data.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::goals;
use super::wire::Wire;
use crate::bench::facts::Machine;
use crate::bench::median;
use peerlane_rxe_vm::process::Outcome;

/// One boot.
#[derive(Debug, Serialize)]
pub(super) struct Record {
    pub(super) machine: Machine,
    /// The version of QEMU.
    pub(super) emulator: String,
    /// The guest's kernel.
    pub(super) kernel: String,
    /// What else the machine did: the load averages of 1, 5 and 15 minutes before the boot.
    pub(super) load: String,
    /// What the peers call themselves.
    pub(super) versions: Vec<String>,
    pub(super) rounds: u16,
    pub(super) puts: Vec<Put>,
    /// What ib_write_bw moves in both directions together, in 10^9 bytes a second.
    pub(super) both_gbs: Vec<f64>,
    pub(super) signal: Signal,
    pub(super) algorithms: Vec<Algorithms>,
    pub(super) sent: Vec<Sent>,
    /// All algorithms over a slow and lossy wire.
    pub(super) lossy: Vec<Algorithms>,
    pub(super) gathers: Vec<Gathers>,
}

/// Puts against ib_write_bw, a figure a turn.
#[derive(Debug, Default, Serialize)]
pub(super) struct Put {
    pub(super) bytes: u64,
    pub(super) queue_pairs: u32,
    pub(super) theirs_gbs: Vec<f64>,
    /// Of ranks that poll, as theirs do.
    pub(super) ours_gbs: Vec<f64>,
    /// Of ranks that look for a while and sleep.
    pub(super) sleeping_gbs: Vec<f64>,
}

/// A put of 8 bytes and a signal against ib_write_lat, one way.
#[derive(Debug, Default, Serialize)]
pub(super) struct Signal {
    pub(super) theirs_us: Vec<f64>,
    /// Of ranks that poll, as theirs do.
    pub(super) ours_us: Vec<f64>,
    /// Of ranks that look for a while and sleep.
    pub(super) sleeping_us: Vec<f64>,
}

/// All algorithms at one size, in turn in the same processes.
#[derive(Debug, Serialize)]
pub(super) struct Algorithms {
    pub(super) total_bytes: u64,
    pub(super) times_us: BTreeMap<String, Vec<f64>>,
}

/// What one all-gather sends over the interface of each node.
#[derive(Debug, Serialize)]
pub(super) struct Sent {
    pub(super) algorithm: String,
    pub(super) shard_bytes: u64,
    /// What the plan says that a node sends.
    pub(super) wanted_bytes: u64,
    /// What the interfaces counted in each round, with headers, acknowledgements, and what was sent
    /// again.
    pub(super) rounds_bytes: Vec<[f64; 2]>,
    /// How often the two devices began to send again, in all rounds.
    pub(super) again: u64,
}

/// The plan that is predicted to be fastest against Open MPI over TCP.
#[derive(Debug, Serialize)]
pub(super) struct Gathers {
    pub(super) total_bytes: u64,
    pub(super) wire: Wire,
    pub(super) algorithm: String,
    pub(super) theirs_us: Vec<f64>,
    pub(super) ours_us: Vec<f64>,
}

impl Record {
    /// Nothing was measured yet.
    pub(super) fn new(machine: Machine, emulator: &str, kernel: &str, rounds: u16) -> Self {
        Self {
            machine,
            emulator: emulator.to_owned(),
            kernel: kernel.to_owned(),
            load: "unknown".to_owned(),
            versions: Vec::new(),
            rounds,
            puts: Vec::new(),
            both_gbs: Vec::new(),
            signal: Signal::default(),
            algorithms: Vec::new(),
            sent: Vec::new(),
            lossy: Vec::new(),
            gathers: Vec::new(),
        }
    }

    /// Writes `rdma.json` and `rdma.md` into `folder`.
    pub(super) fn save(&self, folder: &Path) -> Outcome {
        std::fs::create_dir_all(folder)?;
        let json = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(folder.join("rdma.json"), json)?;
        std::fs::write(folder.join("rdma.md"), self.page()?)?;
        Ok(())
    }

    /// The goals that are missed.
    pub(super) fn missed(&self) -> Vec<String> {
        let puts = self.puts.iter().map(goals::put);
        let signal = std::iter::once(goals::signal(&self.signal));
        let times = self.algorithms.iter().map(goals::time);
        let sent = self.sent.iter().map(goals::sent);
        let gathers = self.gathers.iter().filter_map(goals::gathers);
        let all = puts.chain(signal).chain(times).chain(sent).chain(gathers);
        all.filter_map(Result::err).collect()
    }
}

impl Put {
    /// Our rate by theirs.
    pub(super) fn ratio(&self) -> f64 {
        of(&self.ours_gbs) / of(&self.theirs_gbs)
    }
}

impl Signal {
    /// Our time by theirs.
    pub(super) fn ratio(&self) -> f64 {
        of(&self.ours_us) / of(&self.theirs_us)
    }
}

impl Algorithms {
    /// The time of an algorithm.
    pub(super) fn time_us(&self, algorithm: &str) -> f64 {
        self.times_us.get(algorithm).map_or(f64::NAN, |times| of(times))
    }

    /// The time of the hierarchical plan by that of the direct one.
    pub(super) fn ratio(&self) -> f64 {
        self.time_us("hierarchical") / self.time_us("direct")
    }
}

impl Sent {
    /// `ranks` are those of each node.
    pub(super) fn new(algorithm: &str, ranks: [usize; 2], shard_bytes: u64) -> Self {
        let [own, others] = ranks.map(|ranks| ranks as u64);
        let shards = match algorithm {
            // The node's shards once to the other node.
            "hierarchical" => own,
            // To each rank of the other node.
            _ => own * others,
        };
        let wanted_bytes = shards * shard_bytes;
        let (algorithm, rounds_bytes) = (algorithm.to_owned(), Vec::new());
        Self { algorithm, shard_bytes, wanted_bytes, rounds_bytes, again: 0 }
    }

    /// Enters a round.
    pub(super) fn enter(&mut self, seen_bytes: [f64; 2], again: u64) {
        self.rounds_bytes.push(seen_bytes);
        self.again += again;
    }

    /// Of each node the least of all rounds: what is sent again only adds.
    pub(super) fn seen_bytes(&self) -> [f64; 2] {
        let least = |node: usize| {
            let rounds = self.rounds_bytes.iter().map(|round| round[node]);
            rounds.min_by(f64::total_cmp).unwrap_or(f64::NAN)
        };
        [least(0), least(1)]
    }

    /// What was seen by what the plan says, of the node with more.
    pub(super) fn ratio(&self) -> f64 {
        let [first, second] = self.seen_bytes();
        first.max(second) / self.wanted_bytes as f64
    }
}

impl Gathers {
    /// Nothing was measured yet.
    pub(super) fn new(total_bytes: u64, wire: Wire) -> Self {
        let (theirs_us, ours_us) = (Vec::new(), Vec::new());
        Self { total_bytes, wire, algorithm: String::new(), theirs_us, ours_us }
    }

    /// How many times faster Peerlane is.
    pub(super) fn ratio(&self) -> f64 {
        of(&self.theirs_us) / of(&self.ours_us)
    }
}

/// The median of the rounds; not a number where nothing was measured.
pub(super) fn of(rounds: &[f64]) -> f64 {
    if rounds.is_empty() { f64::NAN } else { median(rounds.iter().copied()) }
}
