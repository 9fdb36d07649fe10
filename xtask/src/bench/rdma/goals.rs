//! What RDMA must reach, in one boot of the virtual machine.

use super::record::{Algorithms, Gathers, Put, Sent, Signal};
use super::wire::Wire;
use crate::bench::record::size;

/// Our rate of puts by that of ib_write_bw.
const PUT: f64 = 0.95;
/// Our time of a put and a signal by that of ib_write_lat.
const SIGNAL: f64 = 1.3;
/// What headers and acknowledgements may add to the bytes of a plan.
const SENT: f64 = 1.05;
/// What counts as alike where the same time is asked for.
const NOISE: f64 = 1.0;

/// `Ok` with what was reached, `Err` with what was missed.
pub(super) type Verdict = Result<String, String>;

pub(super) fn put(put: &Put) -> Verdict {
    let what = format!("put {} with {} queue pairs", size(put.bytes), put.queue_pairs);
    at_least(&what, "of ib_write_bw", put.ratio(), PUT)
}

pub(super) fn signal(signal: &Signal) -> Verdict {
    at_most("put 8 B and signal", "× ib_write_lat", signal.ratio(), SIGNAL)
}

pub(super) fn time(algorithms: &Algorithms) -> Verdict {
    let what = format!("hierarchical {}", size(algorithms.total_bytes));
    at_most(&what, "× direct", algorithms.ratio(), NOISE)
}

pub(super) fn sent(sent: &Sent) -> Verdict {
    at_most(&format!("{} on the wire", sent.algorithm), "× its plan", sent.ratio(), SENT)
}

/// None over a wire that hosts do not have.
pub(super) fn gathers(gathers: &Gathers) -> Option<Verdict> {
    let total = size(gathers.total_bytes);
    let what = match gathers.wire {
        Wire::AsItIs => return None,
        Wire::Packets => format!("all-gather {total} in packets of the MTU"),
        Wire::Slow => format!("all-gather {total} over the slow wire"),
    };
    Some(at_least(&what, "× as fast as Open MPI", gathers.ratio(), 1.0))
}

fn at_least(what: &str, unit: &str, seen: f64, wanted: f64) -> Verdict {
    if seen >= wanted {
        return Ok(format!("≥ {wanted} {unit}"));
    }
    measured(what, seen)?;
    Err(format!("{what}: {seen:.2} {unit}, wanted {wanted}"))
}

fn at_most(what: &str, unit: &str, seen: f64, wanted: f64) -> Verdict {
    if seen <= wanted {
        return Ok(format!("≤ {wanted} {unit}"));
    }
    measured(what, seen)?;
    Err(format!("{what}: {seen:.2} {unit}, wanted at most {wanted}"))
}

/// A side that printed nothing has no figure.
fn measured(what: &str, seen: f64) -> Result<(), String> {
    if seen.is_nan() { Err(format!("{what}: was not measured")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_reached_or_named() {
        let of = |theirs, ours| Put {
            bytes: 65536,
            queue_pairs: 4,
            theirs_gbs: vec![theirs],
            ours_gbs: vec![ours],
            ..Put::default()
        };
        assert_eq!(put(&of(0.1, 0.095)), Ok("≥ 0.95 of ib_write_bw".into()));
        let missed = "put 64 KiB with 4 queue pairs: 0.90 of ib_write_bw, wanted 0.95";
        assert_eq!(put(&of(0.1, 0.09)), Err(missed.into()));
        let slow = Signal { theirs_us: vec![10.0], ours_us: vec![14.0], ..Signal::default() };
        let missed = "put 8 B and signal: 1.40 × ib_write_lat, wanted at most 1.3";
        assert_eq!(signal(&slow), Err(missed.into()));
    }

    #[test]
    fn what_was_not_measured_is_missed() {
        let missed = "put 8 B and signal: was not measured";
        assert_eq!(signal(&Signal::default()), Err(missed.into()));
        assert!(gathers(&Gathers::new(8, Wire::Packets)).unwrap().is_err());
    }

    #[test]
    fn open_mpi_is_a_goal_over_wires_that_hosts_have() {
        let of = |wire| {
            let (theirs_us, ours_us) = (vec![9.0], vec![10.0]);
            gathers(&Gathers { theirs_us, ours_us, ..Gathers::new(1 << 20, wire) })
        };
        assert_eq!(of(Wire::AsItIs), None);
        let missed = |where_to: &str| {
            let seen = "0.90 × as fast as Open MPI, wanted 1";
            Some(Err(format!("all-gather 1 MiB {where_to}: {seen}")))
        };
        assert_eq!(of(Wire::Packets), missed("in packets of the MTU"));
        assert_eq!(of(Wire::Slow), missed("over the slow wire"));
    }

    #[test]
    fn a_hierarchical_plan_sends_the_shards_of_a_node_once() {
        let of = |algorithm| {
            let rounds_bytes = vec![[4040.0, 2000.0], [2020.0, 2010.0]];
            Sent { rounds_bytes, ..Sent::new(algorithm, [2, 2], 1000) }
        };
        assert_eq!(of("hierarchical").wanted_bytes, 2000);
        assert_eq!(of("direct").wanted_bytes, 4000);
        assert!(sent(&of("hierarchical")).is_ok());
        let twice = Sent { rounds_bytes: vec![[4040.0, 2000.0]], ..of("hierarchical") };
        assert!(sent(&twice).is_err());
        assert!(sent(&Sent::new("direct", [2, 2], 1000)).is_err());
    }
}
