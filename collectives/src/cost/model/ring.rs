//! Ring and double ring: every part goes on as soon as it is there.
//!
//! A step is one shard, part by part. The first part of the next step is there one hop after it was
//! put; while the other parts of a step take longer than that, nobody waits for it.

use super::{Task, Way};
use crate::cost::links::transfer_picoseconds;
use crate::cost::predict::Term;
use crate::cost::seen::Seen;
use crate::cost::units::{bytes, rate};
use crate::plan::Tier;

pub(super) fn way(task: &Task<'_>, node_ranks: u64, ways: u64) -> Way {
    let Task { ground, links, .. } = *task;
    let own = Seen::new(links, None, node_ranks, node_ranks);
    let local = Seen::new(links, Some(Tier::Local), node_ranks, node_ranks);
    // The circle leaves each node once.
    let network = Seen::new(links, Some(Tier::Network), node_ranks, 1);
    let peers = ground.ranks - 1;
    let inside = !task.has_network() || node_ranks > 1;
    let used = [(inside, &local), (task.has_network(), &network)];
    let used = || used.iter().filter(|(used, _)| *used).map(|(_, seen)| *seen);
    let part_time = |seen: &Seen| {
        let flags = task.flags(seen, 1).saturating_mul(2);
        let part = seen.puts(1, task.part_bytes()).max(seen.receives(task.part_bytes()));
        part.saturating_add(flags)
    };
    // Of links that are as slow the last, which there always is.
    let slowest = used().max_by_key(|seen| part_time(seen)).unwrap_or(&local);
    let part = part_time(slowest);
    // What leaves the node is relayed by a signal from the home lane.
    let relay = if task.has_network() && inside { own.hop } else { 0 };
    let hop = used().map(|seen| seen.hop).max().unwrap_or(0) + relay;
    let parts = task.parts();
    // With two directions, even parts go further the one way, odd ones the other way.
    let (near, hops) = (peers / ways, peers.div_ceil(ways));
    let puts = hops * parts.div_ceil(ways) + near * (parts - parts.div_ceil(ways));
    let every = if local.by_processor {
        // Two directions of one thread take turns.
        part.saturating_mul(peers.saturating_mul(parts))
    } else {
        slowest.sends(ground.shard_bytes_max.saturating_mul(peers))
    };
    let beside = if local.by_processor { parts * ways } else { parts };
    let bubble = hop.saturating_sub(part.saturating_mul(beside - 1));

    let mut terms = Vec::new();
    if peers > 0 && task.shape.outputs == 1 {
        terms.push(task.ready_term(slowest, 1, &own));
    }
    let all = part.saturating_mul(puts).max(every);
    let all = uneven(task, slowest, all);
    terms.push(task.own_term(&own, all));
    let note = format!(
        "{hops} steps of {parts} × {} at {}",
        bytes(task.part_bytes()),
        rate(slowest.rate(1))
    );
    terms.push(Term::new("puts", all, note));
    if hops > 1 {
        let waits = bubble.saturating_mul(hops - 1);
        terms.push(Term::new("waits for the next part", waits, format!("{} times", hops - 1)));
    }
    if peers > 0 {
        terms.push(Term::new("last arrival", hop, ""));
    }
    let puts = peers.saturating_mul(parts).saturating_mul(slowest.submit);
    let host = puts.saturating_add(task.own_puts().saturating_mul(own.submit));
    Way { terms, host }
}

/// The time of the puts where shards are unlike: every link carries all shards but one, and the
/// largest shard comes a part at a time to the last rank.
fn uneven(task: &Task<'_>, seen: &Seen, even: u64) -> u64 {
    let ground = task.ground;
    let peers = ground.ranks - 1;
    if ground.shard_bytes_max == ground.shard_bytes_min || peers == 0 {
        return even;
    }
    let equal = ground.shard_bytes_max.saturating_mul(peers);
    let carried = ground.total_bytes - ground.shard_bytes_min;
    let journey = ground.shard_bytes_max + task.part_bytes().saturating_mul(peers - 1);
    let saved = equal.saturating_sub(carried.max(journey));
    even.saturating_sub(transfer_picoseconds(saved, seen.rate(1)))
}
