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
    let lane = |seen: &Seen, peers: u64, from: u64| Lane::new(task, seen, peers, from, pull);
    let near = lane(
        &local,
        mates,
        if others == 0 { ground.total_bytes } else { ground.node_bytes(node_ranks) },
    );
    let far = lane(&network, others, ground.total_bytes);
    // Two lanes of one thread take turns.
    let one_thread = local.by_processor && network.by_processor;
    let puts = if one_thread { near.puts + far.puts } else { near.puts.max(far.puts) };
    let slower = if far.puts >= near.puts { &network } else { &local };
    let verb = if pull { "gets" } else { "puts" };
    let mut terms = Vec::new();
    let peers = mates + others;
    if peers > 0 && (pull || task.shape.outputs == 1) {
        let last = if others > 0 { &network } else { &local };
        terms.push(task.ready_term(last, peers, &own));
    }
    terms.push(task.own_term(&own, puts));
    if others > 0 {
        let near = note(task, &local, mates);
        let far = note(task, &network, others);
        terms.push(Term::new(verb, puts, format!("{far} between nodes beside {near} inside")));
    } else {
        terms.push(Term::new(verb, puts, note(task, &local, mates)));
    }
    terms.push(Term::new("flags", near.flags.max(far.flags), "signals and waits"));
    if peers > 0 {
        let name = if pull { "last taken" } else { "last arrival" };
        terms.push(Term::new(name, slower.hop, ""));
    }
    let copies = task.own_puts().saturating_mul(own.submit);
    let host = copies
        .saturating_add((mates * task.parts()).saturating_mul(local.submit))
        .saturating_add((others * task.parts()).saturating_mul(network.submit));
    Way { terms, host }
}

struct Lane {
    puts: u64,
    flags: u64,
}

impl Lane {
    /// To `peers` peers, of a group whose shards are `all` bytes.
    fn new(task: &Task<'_>, seen: &Seen, peers: u64, all: u64, pull: bool) -> Self {
        let ground = task.ground;
        let count = peers.saturating_mul(task.parts());
        let sent = ground.shard_bytes_max.saturating_mul(peers);
        let got = all.saturating_sub(ground.shard_bytes_min).min(sent);
        let (lane, other) = if pull { (got, sent) } else { (sent, got) };
        let puts = seen.puts(count, lane).max(seen.receives(other));
        let signals = if pull { peers } else { count };
        let flags = task.flags(seen, signals).saturating_add(task.flags(seen, signals));
        Self { puts: if peers == 0 { 0 } else { puts }, flags }
    }
}

fn note(task: &Task<'_>, seen: &Seen, peers: u64) -> String {
    let count = peers * task.parts();
    format!("{count} × {} at {}", bytes(task.part_bytes()), rate(seen.rate(count)))
}
