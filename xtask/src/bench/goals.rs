//! What the host backend must reach against Open MPI.

/// From this total on, being no slower is not enough.
const LARGE_BYTES: u64 = 64 << 10;
/// How many times faster than Open MPI a large all-gather must be …
const FASTER: f64 = 1.3;
/// … unless it takes this share of the speed of bare copies.
const SHARE_OF_LIMIT: f64 = 0.9;

/// Says how a size stands: `Ok` with what was reached, `Err` with what was missed.
///
/// `ratio` is the peer's time over ours, `share` that of bare copies over ours.
pub(super) fn judge(total_bytes: u64, ratio: f64, share: Option<f64>) -> Result<String, String> {
    let share_reached = share.filter(|share| *share >= SHARE_OF_LIMIT);
    if ratio < 1.0 {
        return Err(format!("slower than Open MPI: {ratio:.2}"));
    }
    if total_bytes < LARGE_BYTES {
        return Ok("not slower".into());
    }
    match (ratio >= FASTER, share_reached) {
        (true, _) => Ok(format!("≥ {FASTER} × Open MPI")),
        (false, Some(_)) => Ok(format!("≥ {SHARE_OF_LIMIT} of the limit")),
        (false, None) => {
            Err(format!("below {FASTER} × Open MPI and {SHARE_OF_LIMIT} of the limit"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_sizes_need_a_lead_or_the_limit() {
        assert_eq!(judge(65536, 1.3, None), Ok("≥ 1.3 × Open MPI".into()));
        assert_eq!(judge(65536, 1.1, Some(0.95)), Ok("≥ 0.9 of the limit".into()));
        let missed = "below 1.3 × Open MPI and 0.9 of the limit";
        assert_eq!(judge(65536, 1.1, Some(0.8)), Err(missed.into()));
        assert_eq!(judge(65536, 1.1, None), Err(missed.into()));
        assert_eq!(judge(65536, 0.99, Some(0.95)), Err("slower than Open MPI: 0.99".into()));
    }

    #[test]
    fn small_sizes_must_not_be_slower() {
        assert_eq!(judge(1024, 1.0, None), Ok("not slower".into()));
        assert_eq!(judge(1024, 0.5, Some(1.0)), Err("slower than Open MPI: 0.50".into()));
    }
}
