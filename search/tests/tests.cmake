# The tests of the search; the exploits are in tests/. Included by tests/CMakeLists.txt.
if(NOT ACR_SANITIZE MATCHES thread)
  # The sandbox forbids system calls that the sanitizer's runtime makes.
  foreach(name unit_gates unit_gates_sandbox)
    test_program(${name} unit 300)
    target_link_libraries(${name} PRIVATE acromion_workbench)
  endforeach()
  if(ACR_CUDA)
    test_program(unit_gates_cuda unit 300)
    target_link_libraries(unit_gates_cuda PRIVATE acromion_workbench fake_driver)
  endif()
endif()
test_program(unit_evolve unit 120)
target_link_libraries(unit_evolve PRIVATE acromion_workbench)
if(NOT ACR_SANITIZE) # looks at sources
  register(evolve_spaces tree 120 ${Python3_EXECUTABLE} search/tests/evolve_spaces.py $<TARGET_FILE:unit_evolve>)
endif()
# Whole searches: under sanitizers every candidate's process is one more program to start, so only the shortest.
set(searches usage trials)
if(ACR_SANITIZE MATCHES thread) # its runtime makes system calls that the sandbox of candidates forbids
  set(searches "")
elseif(NOT ACR_SANITIZE)
  set(searches usage moved trials interrupt chat proposers source runs device gpus kill)
endif()
set(driver "")
if(ACR_CUDA)
  set(driver --driver ${fake_driver_folder})
endif()
foreach(search IN LISTS searches)
  register(evolve_${search} search 600 ${Python3_EXECUTABLE} search/tests/evolve.py $<TARGET_FILE:acromion-cli>
    ${scratch} --kills 4 ${driver} ${search})
endforeach()
