//! Direct and pull: everything to, or from, every peer.

use super::{Task, Way};
use crate::cost::predict::Term;
use crate::cost::seen::Seen;
use crate::cost::units::{bytes, rate};
use crate::plan::{Algorithm, Tier};

pub(super) fn way(task: &Task<'_>, node_ranks: u64) -> Way {
    let Task { algorithm, ground, links, .. } = *task;
    let own = Seen::new(links, None, node_ranks, node_ranks);
    let seen = |tier| Seen::new(links, Some(tier), node_ranks, node_ranks);
    let (local, network) = (seen(Tier::Local), seen(Tier::Network));
    let mates = if task.has_network() { node_ranks - 1 } else { ground.ranks - 1 };
    let others = ground.ranks - 1 - mates;
    let pull = algorithm == Algorithm::Pull;
    let among = if others == 0 { ground.total_bytes } else { ground.node_bytes(node_ranks) };
    let near = Lane::new(task, &local, mates, among, Some(&own));
    let mut far = Lane::new(task, &network, others, ground.total_bytes, None);
    if others > 0 {
        // The lane starts on a flag from home, and ends with one to it.
        far.ready = far.ready.saturating_add(own.hop);
        far.hop = far.hop.saturating_add(own.hop);
    }
    // Two lanes of one thread take turns.
    let one_thread = others > 0 && local.by_processor && network.by_processor;
    let (mut ready, mut puts, mut flags, mut hop) = near.terms();
    let copy = if own.by_processor { task.own_copy(&own) } else { 0 };
    let mut copied = task.own_term(&own, puts.max(far.puts));
    if one_thread {
        puts += far.puts;
        flags += far.flags;
        hop = hop.max(far.hop);
    } else if far.end() > near.end().saturating_add(copy) {
        (ready, puts, flags, hop) = far.terms();
        if own.by_processor {
            copied = Term::new(copied.name, 0, "");
        }
    }
    let (verb, last) = if pull { ("gets", "last taken") } else { ("puts", "last arrival") };
    let inside = note(task, &local, mates);
    let note = match (mates, others) {
        (_, 0) => inside,
        (0, _) => format!("{} between nodes", note(task, &network, others)),
        _ => format!("{} between nodes, {inside} inside", note(task, &network, others)),
    };
    let terms = vec![
        Term::new("ready", ready, format!("of {} peers", mates + others)),
        copied,
        Term::new(verb, puts, note),
        Term::new("flags", flags, "signals and waits"),
        Term::new(last, hop, ""),
    ];
    let copies = task.own_puts().saturating_mul(own.submit);
    let host = copies
        .saturating_add((mates * task.parts()).saturating_mul(local.submit))
        .saturating_add((others * task.parts()).saturating_mul(network.submit));
    Way { terms, host }
}

#[derive(Default)]
struct Lane {
    ready: u64,
    puts: u64,
    flags: u64,
    hop: u64,
}

impl Lane {
    /// To `peers` peers, of a group whose shards are `among` bytes; home makes the `own` copy too.
    fn new(task: &Task<'_>, seen: &Seen, peers: u64, among: u64, own: Option<&Seen>) -> Self {
        if peers == 0 {
            return Self::default();
        }
        let ground = task.ground;
        let pull = task.algorithm == Algorithm::Pull;
        let count = peers.saturating_mul(task.parts());
        let sent = ground.shard_bytes_max.saturating_mul(peers);
        let got = among.saturating_sub(ground.shard_bytes_min).min(sent);
        let (lane, other) = if pull { (got, sent) } else { (sent, got) };
        // Signals of arrival, or that something was taken; and as many waits.
        let signals = if pull { peers } else { count };
        Self {
            ready: task.ready(seen, peers, own),
            puts: if pull { seen.gets(count, lane) } else { seen.puts(count, lane) }
                .max(seen.receives(other)),
            flags: task.flags(seen, signals).saturating_mul(2),
            hop: seen.hop,
        }
    }

    fn terms(&self) -> (u64, u64, u64, u64) {
        (self.ready, self.puts, self.flags, self.hop)
    }

    fn end(&self) -> u64 {
        self.ready.saturating_add(self.puts).saturating_add(self.flags).saturating_add(self.hop)
    }
}

fn note(task: &Task<'_>, seen: &Seen, peers: u64) -> String {
    let count = peers * task.parts();
    let pull = task.algorithm == Algorithm::Pull;
    let at = if pull { seen.rate_of_gets(count) } else { seen.rate(count) };
    format!("{count} × {} at {}", bytes(task.part_bytes()), rate(at))
}
