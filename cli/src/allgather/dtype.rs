//! From the element type that an option names to one of Rust's.

/// Does `$work`, in which `$element` is the type of the elements.
macro_rules! of_dtype {
    ($dtype:expr, $element:ident => $work:expr) => {
        match $dtype {
            peerlane::DType::U8 => {
                type $element = u8;
                $work
            }
            peerlane::DType::I32 => {
                type $element = i32;
                $work
            }
            peerlane::DType::I64 => {
                type $element = i64;
                $work
            }
            peerlane::DType::F16 => {
                type $element = half::f16;
                $work
            }
            peerlane::DType::Bf16 => {
                type $element = half::bf16;
                $work
            }
            peerlane::DType::F32 => {
                type $element = f32;
                $work
            }
            peerlane::DType::F64 => {
                type $element = f64;
                $work
            }
            other => Err($crate::error::Failure::usage(format!(
                "--dtype {other} is not measured by this program"
            ))),
        }
    };
}

pub(super) use of_dtype;
