//! Tests how ranks find each other, exchange values, and learn of losses.
//!
//! | module | shows |
//! | --- | --- |
//! | `attacks` | strangers and members with the secret neither stop a start nor fill the memory of rank 0, which is a process of its own |
//! | `environment` | what launchers say, and what is wrong with it |
//! | `in_process` | the list of `checks` for ranks that are threads |
//! | `starts` | every rank names the one that is missing or has ended |
//! | `tcp` | the list of `checks` for ranks that are processes, and how a group ends there |
//! | `tcp_secret` | only who knows the secret of the job joins, and others delay nobody |
//! | `tcp_start` | who is taken, who is refused, and who is missed |

mod attacks;
mod checks;
mod environment;
mod in_process;
mod starts;
mod support;
mod tcp;
mod tcp_secret;
mod tcp_start;
