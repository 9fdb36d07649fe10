//! Ring and double ring: every part goes on as soon as it is there.
//!
//! A step is one shard, part by part. Either the slowest link is busy all the time, or what takes
//! longest is the journey of one shard: its first part over every link, then the others behind it.

use super::{Task, Way};
use crate::cost::links::transfer_picoseconds;
use crate::cost::predict::Term;
use crate::cost::seen::Seen;
use crate::cost::units::{bytes, rate, time};
use crate::plan::Tier;

pub(super) fn way(task: &Task<'_>, node_ranks: u64, ways: u64) -> Way {
    let Task { ground, links, .. } = *task;
    let own = Seen::new(links, None, node_ranks, node_ranks);
    let local = Seen::new(links, Some(Tier::Local), node_ranks, node_ranks);
    // The circle leaves each node once in each direction.
    let network = Seen::new(links, Some(Tier::Network), node_ranks, ways);
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
    let parts = task.parts();
    // With two directions, even parts go further the one way, odd ones the other way.
    let (near, hops) = (peers / ways, peers.div_ceil(ways));
    let puts = hops * parts.div_ceil(ways) + near * (parts - parts.div_ceil(ways));
    let shards = |count: u64| ground.shard_bytes_max.saturating_mul(count);
    // Two directions leave a node at two ranks, unless it has only one; and of two ranks each has one
    // direction inside.
    let one_way = peers.div_ceil(ways);
    let inside_shards = if task.has_network() && node_ranks == 2 { one_way } else { peers };
    let out_shards = if node_ranks > 1 { one_way } else { peers };
    let every = match local.by_processor {
        _ if !inside => 0,
        // Two directions of one thread take turns.
        true => part_time(&local).saturating_mul(inside_shards.saturating_mul(parts)),
        false => local.sends(shards(inside_shards)),
    };
    let out = if task.has_network() { network.sends(shards(out_shards)) } else { 0 };
    let every = every.max(out);
    // All but the own shard came from the rank before.
    let foreign = peers.saturating_sub(1);
    let passed_on = slowest.passed_on(foreign * parts, shards(foreign));
    let all = uneven(task, slowest, part.saturating_mul(puts).max(every).saturating_add(passed_on));
    // What leaves the node is relayed by a signal from the home lane.
    let relay = if task.has_network() && inside { own.hop } else { 0 };
    let last_hop = used().map(|seen| seen.hop).max().unwrap_or(0);
    let passed_on_part = |seen: &Seen| seen.passed_on(1, task.part_bytes());
    let edge = |seen: &Seen, relay: u64| {
        part_time(seen).saturating_add(passed_on_part(seen)).saturating_add(seen.hop + relay)
    };
    let (near_edge, far_edge) = (edge(&local, 0), edge(&network, relay));
    // A shard crosses at most one way out of each node, and every other link at most once.
    let out = if task.has_network() { ground.nodes.min(hops) } else { 0 };
    let stay = hops.min(ground.ranks - if task.has_network() { ground.nodes } else { 0 });
    let by = |out: u64| {
        far_edge.saturating_mul(out).saturating_add(near_edge.saturating_mul(hops - out))
    };
    let others = part.saturating_add(passed_on_part(slowest)).saturating_mul(parts - 1);
    let journey = by(out).max(by(hops - stay)).saturating_add(others);
    // It begins where its shard is at home.
    let journey = journey.saturating_sub(passed_on_part(&local).min(passed_on_part(slowest)));
    let uneven_overlap = overlaps(task, slowest) && ground.shard_bytes_max > ground.shard_bytes_min;
    let waits = match uneven_overlap {
        true => 0,
        false => journey.saturating_sub(all.saturating_add(last_hop)),
    };

    let mut terms = Vec::new();
    let furthest = used().max_by_key(|seen| seen.hop).unwrap_or(&local);
    let ready = task.ready(furthest, peers.min(1), Some(&own));
    // Where only network lanes have work, they start on a flag from home and end with one to it.
    let entry = if inside { 0 } else { own.hop };
    let (ready, last_hop) = (ready + entry, last_hop + entry);
    terms.push(Term::new("ready", ready, "of the next rank"));
    terms.push(task.own_term(&own, all.saturating_add(waits)));
    let longer = match passed_on {
        0 => String::new(),
        _ => format!(", {} longer as peers have just put it there", time(passed_on)),
    };
    let note = format!(
        "{hops} steps of {parts} × {} at {}{longer}",
        bytes(task.part_bytes()),
        rate(slowest.rate(1))
    );
    terms.push(Term::new("puts", all, note));
    if hops > 0 {
        terms.push(Term::new("waits for the next part", waits, format!("on {hops} steps")));
        terms.push(Term::new("last arrival", last_hop, ""));
    }
    let puts = peers.saturating_mul(parts).saturating_mul(slowest.submit);
    let host = puts.saturating_add(task.own_puts().saturating_mul(own.submit));
    Way { terms, host }
}

/// Whether what one start still waits for goes on beside the next start.
fn overlaps(task: &Task<'_>, seen: &Seen) -> bool {
    task.shape.outputs > 1 && !seen.by_processor
}

/// The time of the puts where shards are unlike: every link carries all shards but one, and the
/// largest shard comes a part at a time to the last rank. Starts that have outputs in turn and engines
/// of a device overlap: there the journey of one start goes on beside the next one.
fn uneven(task: &Task<'_>, seen: &Seen, even: u64) -> u64 {
    let ground = task.ground;
    let peers = ground.ranks - 1;
    if ground.shard_bytes_max == ground.shard_bytes_min || peers == 0 {
        return even;
    }
    let equal = ground.shard_bytes_max.saturating_mul(peers);
    let carried = ground.total_bytes - ground.shard_bytes_min;
    let journey = ground.shard_bytes_max + task.part_bytes().saturating_mul(peers - 1);
    let needed = if overlaps(task, seen) { carried } else { carried.max(journey) };
    let saved = equal.saturating_sub(needed);
    even.saturating_sub(transfer_picoseconds(saved, seen.rate(1)))
}
