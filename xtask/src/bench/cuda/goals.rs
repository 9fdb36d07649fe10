//! What all-gathers between GPUs must reach, in one run with NCCL.

use super::sample::{Beside, Sample};

/// From this total on an eager gather out of place must come so near to the limit, and be so many
/// times as fast as NCCL's best path.
const LARGE: [(u64, f64, f64); 3] =
    [(1 << 30, 0.97, 1.06), (256 << 20, 0.94, 1.08), (64 << 20, 0.84, 1.0)];
/// Up to this total it must be so many times as fast as NCCL's copy engines.
const SMALL: (u64, f64) = (4 << 20, 1.6);
/// At this total a start takes at most so long: with an output lease, and asking for `ready`.
const MEDIUM: (u64, f64, f64) = (1 << 20, 18.0, 27.0);
/// What a start may cost the host, in µs.
const HOST_US: f64 = 8.0;
/// In place is allowed the noise of a run.
const IN_PLACE: f64 = 1.02;
/// What compute and gathers may cost each other.
const BESIDE: f64 = 1.06;

/// Says how a sample stands: what was reached, or what was missed. `None` where nothing is asked;
/// `out_of_place` is the same size and plan out of place.
pub(super) fn judge(
    sample: &Sample,
    out_of_place: Option<&Sample>,
) -> Option<Result<String, String>> {
    let mut verdicts = Verdicts::default();
    let total = sample.total_bytes;
    let copy_engines = || sample.against(sample.rival_us("copy engines"));
    match sample.run.as_str() {
        "out-of-place" => {
            if let Some((_, share, best)) = LARGE.iter().find(|(from, ..)| total >= *from) {
                verdicts.at_least("of the limit", sample.share(), *share);
                verdicts.at_least("× NCCL's best", sample.against(sample.best_us()), *best);
            }
            if total <= SMALL.0 {
                verdicts.at_least("× NCCL's copy engines", copy_engines(), SMALL.1);
            }
            if total == MEDIUM.0 && sample.outputs == 2 {
                verdicts.at_most("µs", sample.median_us, MEDIUM.1);
            }
            verdicts.at_most("µs of the host", sample.host_us, HOST_US);
        }
        "with-ready" if total == MEDIUM.0 => {
            verdicts.at_most("µs", sample.median_us, MEDIUM.2);
        }
        "in-place" => {
            if let Some(other) = out_of_place {
                let ratio = sample.median_us / other.median_us;
                verdicts.at_most("× out of place", ratio, IN_PLACE);
            }
        }
        "captured" | "captured-in-place" => {
            verdicts.at_least("× NCCL's copy engines", copy_engines(), 1.0);
        }
        _ => {}
    }
    verdicts.result()
}

/// The same for ours beside compute, among all paths of one size.
pub(super) fn judge_beside(ours: &Beside, all: &[Beside]) -> Result<String, String> {
    let mut verdicts = Verdicts::default();
    verdicts.at_most("× the GEMM alone", ours.compute_ratio, BESIDE);
    verdicts.at_most("× the gather alone", ours.gather_ratio, BESIDE);
    if !ours.overlapped {
        verdicts.missed.push("one side ended too early".to_owned());
    }
    let better = |other: &&Beside| {
        other.compute_ratio < ours.compute_ratio && other.gather_us < ours.gather_us
    };
    if let Some(other) = all.iter().find(better) {
        verdicts.missed.push(format!("{} is better on both", other.path));
    }
    verdicts.result().unwrap_or_else(|| Ok(String::new()))
}

#[derive(Default)]
struct Verdicts {
    reached: Vec<String>,
    missed: Vec<String>,
}

impl Verdicts {
    fn at_least(&mut self, what: &str, seen: Option<f64>, wanted: f64) {
        match seen {
            Some(seen) if seen >= wanted => self.reached.push(format!("≥ {wanted} {what}")),
            Some(seen) => self.missed.push(format!("{seen:.3} {what}, wanted {wanted}")),
            // A rival that is not there is nothing to miss.
            None => {}
        }
    }

    fn at_most(&mut self, what: &str, seen: f64, wanted: f64) {
        if seen <= wanted {
            self.reached.push(format!("≤ {wanted} {what}"));
        } else {
            self.missed.push(format!("{seen:.3} {what}, wanted {wanted}"));
        }
    }

    fn result(self) -> Option<Result<String, String>> {
        match (self.reached.as_slice(), self.missed.as_slice()) {
            ([], []) => None,
            (reached, []) => Some(Ok(reached.join(", "))),
            (_, missed) => Some(Err(missed.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::tests::{nccl, sample};
    use super::*;

    #[test]
    fn large_sizes_are_measured_by_the_limit_and_by_the_best_path() {
        let more = nccl(2450.0, 2411.0, 2221.0) + r#","limit_us":2055.0"#;
        let good = sample("out-of-place", 1 << 30, 2080.0, &more);
        let wanted = "≥ 0.97 of the limit, ≥ 1.06 × NCCL's best, ≤ 8 µs of the host";
        assert_eq!(judge(&good, None), Some(Ok(wanted.into())));
        let slow = sample("out-of-place", 1 << 30, 2200.0, &more);
        let missed = "0.934 of the limit, wanted 0.97, 1.010 × NCCL's best, wanted 1.06";
        assert_eq!(judge(&slow, None), Some(Err(missed.into())));
    }

    #[test]
    fn small_and_captured_sizes_are_measured_by_copy_engines() {
        let more = nccl(13.0, 9.0, 32.0);
        let good = sample("out-of-place", 1 << 20, 18.0, &more);
        assert!(judge(&good, None).unwrap().is_ok());
        let slow = sample("out-of-place", 1 << 20, 21.0, &more);
        assert!(judge(&slow, None).unwrap().unwrap_err().contains("1.524 × NCCL's copy engines"));
        let captured = sample("captured", 1 << 20, 33.0, &more);
        assert!(judge(&captured, None).unwrap().is_err());
    }

    #[test]
    fn in_place_is_not_slower_than_out_of_place() {
        let other = sample("out-of-place", 1 << 24, 50.0, "");
        assert!(judge(&sample("in-place", 1 << 24, 50.0, ""), Some(&other)).unwrap().is_ok());
        assert!(judge(&sample("in-place", 1 << 24, 53.0, ""), Some(&other)).unwrap().is_err());
        assert_eq!(judge(&sample("in-place", 1 << 24, 53.0, ""), None), None);
    }

    #[test]
    fn no_path_of_nccl_is_better_on_both() {
        let beside = |path: &str, compute_ratio, gather_us| Beside {
            path: path.into(),
            compute_ratio,
            gather_ratio: 1.02,
            gather_alone_us: 150.0,
            gather_us,
            overlapped: true,
        };
        let ours = beside("peerlane", 1.04, 153.0);
        let all = [ours.clone(), beside("NCCL", 1.02, 160.0)];
        assert!(judge_beside(&ours, &all).is_ok());
        let all = [ours.clone(), beside("NCCL", 1.02, 150.0)];
        assert_eq!(judge_beside(&ours, &all), Err("NCCL is better on both".into()));
    }
}
