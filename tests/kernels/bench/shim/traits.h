// Type traits: the part of <metal_type_traits> that kernels and MLX's headers use.
#pragma once

namespace bench {
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { typedef T type; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;

template <typename A, typename B> struct is_same { static constexpr __constant bool value = false; };
template <typename A> struct is_same<A, A> { static constexpr __constant bool value = true; };
template <typename A, typename B> inline constexpr __constant bool is_same_v = is_same<A, B>::value;

template <typename T> struct is_scalar { static constexpr __constant bool value = __is_arithmetic(T) || __is_enum(T); };
template <> struct is_scalar<half> { static constexpr __constant bool value = true; };
template <> struct is_scalar<bfloat> { static constexpr __constant bool value = true; };
template <typename T> inline constexpr __constant bool is_scalar_v = is_scalar<T>::value;
template <typename T> inline constexpr __constant bool is_integer_v = __is_integral(T) || __is_enum(T);
}  // namespace bench

namespace metal {
using bench::enable_if;
using bench::enable_if_t;
using bench::is_same;
using bench::is_same_v;

template <bool B, typename T, typename F> struct conditional { typedef T type; };
template <typename T, typename F> struct conditional<false, T, F> { typedef F type; };
template <bool B, typename T, typename F> using conditional_t = typename conditional<B, T, F>::type;

template <typename T, T V> struct integral_constant {
  static constexpr __constant T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool B> using bool_constant = integral_constant<bool, B>;

template <typename T> struct remove_cv { typedef __remove_cv(T) type; };
template <typename T> using remove_cv_t = typename remove_cv<T>::type;
template <typename T> struct remove_reference { typedef T type; };
template <typename T> struct remove_reference<T&> { typedef T type; };
template <typename T> using remove_reference_t = typename remove_reference<T>::type;

template <typename T> struct remove_addrspace { typedef T type; };
template <typename T> struct remove_addrspace<const __global T> { typedef const T type; };
template <typename T> struct remove_addrspace<const __local T> { typedef const T type; };
template <typename T> struct remove_addrspace<const __private T> { typedef const T type; };
template <typename T> struct remove_addrspace<const __constant T> { typedef const T type; };
template <typename T> struct remove_addrspace<__global T> { typedef T type; };
template <typename T> struct remove_addrspace<__local T> { typedef T type; };
template <typename T> struct remove_addrspace<__private T> { typedef T type; };
template <typename T> struct remove_addrspace<__constant T> { typedef T type; };
template <typename T> using remove_addrspace_t = typename remove_addrspace<T>::type;

template <typename T> struct is_integral : bool_constant<__is_integral(T)> {};
template <typename T> struct is_arithmetic : bool_constant<bench::is_scalar_v<T> && !__is_enum(T)> {};
template <typename T>
struct is_floating_point : bool_constant<is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>> {};
template <typename T> struct is_signed : bool_constant<__is_signed(T) || is_floating_point<T>::value> {};
template <typename T> struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <typename A, typename B> struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <typename A> struct is_void : is_same<A, void> {};
template <typename T> struct is_pointer : false_type {};
template <typename T> struct is_pointer<T*> : true_type {};
template <typename T> struct is_const : bool_constant<__is_const(T)> {};
template <typename T> struct add_lvalue_reference { typedef T& type; };

template <typename T> inline constexpr __constant bool is_integral_v = is_integral<T>::value;
template <typename T> inline constexpr __constant bool is_floating_point_v = is_floating_point<T>::value;
template <typename T> inline constexpr __constant bool is_signed_v = is_signed<T>::value;
template <typename T> inline constexpr __constant bool is_unsigned_v = is_unsigned<T>::value;
template <typename T> inline constexpr __constant bool is_arithmetic_v = is_arithmetic<T>::value;
template <typename A, typename B> inline constexpr __constant bool is_convertible_v = is_convertible<A, B>::value;

template <typename...> struct _disjunction : false_type {};
template <typename A, typename... R>
struct _disjunction<A, R...> : conditional_t<A::value, true_type, _disjunction<R...>> {};
template <typename...> struct _conjunction : true_type {};
template <typename A, typename... R>
struct _conjunction<A, R...> : conditional_t<A::value, _conjunction<R...>, false_type> {};
template <typename A> struct _negation : bool_constant<!A::value> {};
}  // namespace metal
