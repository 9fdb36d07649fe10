//! Implements the algorithm get-ring, in which every rank gets blocks from the previous rank.
//!
//! Blocks move as in the algorithm [ring](super::ring), but each copy is made by the rank that
//! receives it. A rank signals `ready` when its own block may be read. The next rank gets that
//! block from the input, and every other chunk from the output of the previous rank, as soon as the
//! chunk is there.
//!
//! A signal to another rank does not say that a get is complete; only a signal to the own rank
//! does. So lane 0 makes the gets, and signals each chunk that the next rank needs to lane 1 of its
//! own rank. Lane 1 relays the arrival to the next rank, while lane 0 continues with the next get.
//!
//! The next rank reads the input and the output of a rank until it has signalled `taken`, so lane 0
//! ends with a wait for that. As in pull, no other rank writes the output, so two outputs in turn
//! save nothing.
//!
//! The algorithm does not support a network between the nodes, which would need two more lanes.

use peerlane_hal::Rank;

use super::ring::{RING, ring_order, source};
use super::steps::{arrived, cells, ready, self_copy, signal, wait};
use super::{PlanRequest, Schedule};
use crate::plan::{Algorithm, Flag, Lane, LaneId, Step, Tier};

/// The lane that announces to the next rank what lane 0 has got.
const RELAY_LANE: LaneId = LaneId(1);

pub(super) const GET_RING: Schedule = Schedule {
    algorithm: Algorithm::GetRing,
    fits: |topology, shape| match shape.tiers && topology.nodes() > 1 {
        true => Err("a network connects the nodes"),
        false => Ok(()),
    },
    lanes,
    gets: true,
    lane_count: |_, _| 2,
    // The estimate of the ring takes gets in the place of puts.
    ..RING
};

fn lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    let &PlanRequest { rank, shape, .. } = request;
    let order = ring_order(request);
    let last = order.len() - 1;
    let rank_after = |by: usize| order[by % order.len()];
    let (previous, next) = (rank_after(last), rank_after(1));

    // The block of this rank has made no hop, and the blocks that it gets make 1 to `last` hops.
    // The root of a broadcast gets nothing, so no rank reads the memory of the rank before it.
    let origin = |hop: usize| rank_after(order.len() - hop);
    let is_provided = |hop: &usize| request.is_provider(origin(*hop));
    let gets = (1..=last).any(|hop| is_provided(&hop));
    let is_read = (0..last).any(|hop| is_provided(&hop));

    let mut home = Vec::new();
    if is_read && request.is_provider(rank) {
        home.push(signal(next, ready(rank, LaneId::HOME)));
    }

    // The self copy can run until the previous rank is ready, so a prompt wait comes after it.
    // Batched flags belong next to each other.
    let awaited = (gets && request.is_provider(previous)).then(|| ready(previous, LaneId::HOME));
    let batched = awaited.filter(|_| shape.flags.is_batched());
    let prompt = awaited.filter(|_| !shape.flags.is_batched());
    home.extend(batched.map(wait));
    home.extend(self_copy(request));
    home.extend(prompt.map(wait));

    let mut relay = Vec::new();
    for hop in (1..=last).filter(is_provided) {
        for cell in cells(origin(hop), shape.chunks) {
            if hop > 1 {
                home.push(wait(arrived(cell, LaneId::HOME)));
            }
            home.push(Step::Get { peer: previous, cell, from: source(hop - 1) });

            // The next rank provides the blocks that have made all hops.
            if hop < last {
                home.push(signal(rank, arrived(cell, RELAY_LANE)));
                relay.push(wait(arrived(cell, RELAY_LANE)));
                relay.push(signal(next, arrived(cell, LaneId::HOME)));
            }
        }
    }

    let taken = |by: Rank| Flag::Taken { by, lane: LaneId::HOME };
    home.extend(gets.then(|| signal(previous, taken(rank))));
    home.extend(is_read.then(|| wait(taken(next))));

    [home, relay].map(|steps| Lane { tier: Tier::Local, steps }).into()
}
