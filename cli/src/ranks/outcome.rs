//! How the processes of a group ended, and what to say about it.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use crate::error::{Failure, Result};

/// How each rank ended, in the order in which they did.
#[derive(Debug)]
pub(crate) struct Outcome {
    ranks: usize,
    ended: Vec<(usize, ExitStatus)>,
    gave_up: bool,
}

impl Outcome {
    /// Nobody has ended yet.
    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks, ended: Vec::with_capacity(ranks), gave_up: false }
    }

    /// A rank has ended.
    pub(crate) fn ended(&mut self, rank: usize, status: ExitStatus) {
        self.ended.push((rank, status));
    }

    /// The ranks that have not ended will be killed now.
    pub(crate) fn patience_ended(&mut self) {
        self.gave_up = true;
    }

    /// Whether a rank has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.ended.iter().any(|(_, status)| !status.success())
    }

    /// # Errors
    /// If a rank failed: the one that was killed, or else the first; and who had to be killed.
    pub(crate) fn judge(&self, doing: &str) -> Result<()> {
        let failed = || self.ended.iter().filter(|(_, status)| !status.success());
        let killed = failed().find(|(_, status)| status.signal().is_some());
        let Some((rank, status)) = killed.or(failed().next()) else { return Ok(()) };
        let mut text = format!("rank {rank} {}; last seen {doing}", how(*status));
        let left = self.left();
        if self.gave_up && !left.is_empty() {
            let ranks = if left.len() == 1 { "rank" } else { "ranks" };
            text += &format!("; {ranks} {} did not end in time and had to be killed", list(&left));
        }
        Err(Failure::failed(text).with_advice(advice(*status)))
    }

    fn left(&self) -> Vec<usize> {
        let has_ended = |rank| self.ended.iter().any(|(ended, _)| *ended == rank);
        (0..self.ranks).filter(|rank| !has_ended(*rank)).collect()
    }
}

fn how(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal} ({})", signal_name(signal)),
        (None, Some(code)) => format!("failed with exit status {code}"),
        (None, None) => format!("ended in an unknown way ({status})"),
    }
}

fn advice(status: ExitStatus) -> &'static str {
    match status.signal() {
        Some(9) => {
            "if nobody killed it, the machine ran out of memory (see `dmesg`): lower --max-bytes or \
             --ranks"
        }
        Some(7) => "shared memory ran out: lower --max-bytes or --ranks",
        Some(_) => "this is a fault in Peerlane unless somebody sent the signal: please report it",
        None => "its own messages are above, marked with its rank",
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        _ => "see `kill -l`",
    }
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED: i32 = 9;
    const EXIT_1: i32 = 1 << 8;

    fn outcome(ended: &[(usize, i32)], gave_up: bool) -> Outcome {
        let mut outcome = Outcome::new(4);
        for (rank, raw) in ended {
            outcome.ended(*rank, ExitStatus::from_raw(*raw));
        }
        if gave_up {
            outcome.patience_ended();
        }
        outcome
    }

    #[test]
    fn all_well_is_no_failure() {
        assert_eq!(outcome(&[(1, 0), (0, 0), (3, 0), (2, 0)], false).judge("x"), Ok(()));
    }

    #[test]
    fn the_killed_rank_is_named_even_if_others_failed_first() {
        let outcome = outcome(&[(1, EXIT_1), (2, KILLED), (0, EXIT_1), (3, EXIT_1)], false);
        insta::assert_snapshot!(outcome.judge("measuring 1 MiB").unwrap_err(), @"
        error: rank 2 was killed by signal 9 (SIGKILL); last seen measuring 1 MiB
         help: if nobody killed it, the machine ran out of memory (see `dmesg`): lower --max-bytes or --ranks
        ");
    }

    #[test]
    fn the_first_failure_is_named_and_who_had_to_be_killed() {
        let outcome = outcome(&[(3, 0), (2, EXIT_1)], true);
        insta::assert_snapshot!(outcome.judge("checking 4 KiB").unwrap_err(), @"
        error: rank 2 failed with exit status 1; last seen checking 4 KiB; ranks 0, 1 did not end in time and had to be killed
         help: its own messages are above, marked with its rank
        ");
    }
}
